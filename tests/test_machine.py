"""How much memory is left to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt_kernel.runtime import machine


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.mark.parametrize("inside", [False, True])  # a container does not see its path outside
def test_limits_of_control_groups(tmp_path: Path, inside: bool) -> None:
    write(tmp_path / "proc" / "self", cgroup="0::/user/session")
    top = tmp_path / "sys" / "fs" / "cgroup"
    stat = "anon 5\ninactive_file 20\n"
    write(top if inside else top / "user", memory__max=100, memory__current=70, memory__stat=stat)
    write(top / "user" / "session", memory__max="max", memory__current=70)
    assert min(machine._groups(tmp_path)) == (100, 50)


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc" / "self", cgroup="3:cpu,cpuacct:/a\n2:memory:/a\n0::/a")
    group = tmp_path / "sys" / "fs" / "cgroup" / "memory" / "a"
    write(group, memory__limit_in_bytes=100, memory__usage_in_bytes=130)
    assert min(machine._groups(tmp_path)) == (100, 0)


def test_without_limits(tmp_path: Path) -> None:
    (unlimited,) = machine._groups(tmp_path)
    assert min(unlimited) > 1 << 60
    assert 1 << 20 < machine.available_memory() < machine.most_memory() < 1 << 60
