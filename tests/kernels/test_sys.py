"""What kernels/sys says of this machine (test_threads.py has its C++ tests)."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from .compiling import CPP, KERNELS, WARNINGS, build, build_objects

SYS = KERNELS / "sys"


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sys") / "sys_probe"
    sources = sorted(p for p in SYS.glob("*.cpp") if not p.name.startswith("cuda"))
    flags = ["-O0", "-fsanitize=undefined", *WARNINGS]
    compiled = [(path, flags) for path in (CPP / "sys_probe.cpp", *sources)]
    return build(out, build_objects(out.parent, compiled), flags)


def ask(probe: Path, *args: object, topology: str | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if k != "KT_TOPOLOGY"}
    if topology is not None:
        env["KT_TOPOLOGY"] = topology
    command = [str(probe), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    return result.stdout.strip()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


# --- topology ---------------------------------------------------------------------------------


def test_topology_of_this_machine(probe: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert ask(probe, "allowed").split() == [str(c) for c in allowed]
    listed = []
    for line in ask(probe, "topology").splitlines():
        head, cpus = line.split(":")
        _, cores = map(int, head.split())
        assert 1 <= cores <= len(cpus.split())
        listed += map(int, cpus.split())
    assert sorted(listed) == allowed


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0:0,2;1:1,3", "0 2: 0 2\n1 2: 1 3"),
        ("0:0", "0 1: 0"),
        ("3:4-6;1:900", "1 1: 900\n3 3: 4 5 6"),
        ("0:5,0-1", "0 3: 0 1 5"),
    ],
)
def test_topology_override(probe: Path, value: str, expected: str) -> None:
    assert ask(probe, "topology", topology=value) == expected


def test_empty_override_counts_as_unset(probe: Path) -> None:
    assert ask(probe, "topology", topology="") == ask(probe, "topology")


@pytest.mark.parametrize(
    "value",
    [
        "two",
        "0",
        "0:",
        ":0",
        "0:0;",
        ";0:0",
        "0:0;;1:1",
        "0:0,,1",
        "0:0,",
        "0:1-0",
        "0:-1",
        "-1:0",
        "0:a",
        "0:0x",
        "0,1:0",
        "0:0:1",
        "0:0;0:1",
        "0:0;1:0",
        "0:0-99999999999",
        "0:99999999999999999999",
        "0:+1",
    ]
    + [" ", "0: 0", "0:0 1:1"],
)
def test_malformed_override(probe: Path, value: str) -> None:
    result = subprocess.run(
        [probe, "topology"], capture_output=True, text=True, env={"KT_TOPOLOGY": value}
    )
    assert result.returncode == 2
    assert f'KT_TOPOLOGY="{value}"' in result.stderr
    assert '"0:0,2;1:1,3"' in result.stderr  # the expected form


def siblings(pairs: list[tuple[int, int]]) -> dict[str, str]:
    files = {}
    for a, b in pairs:
        for cpu in (a, b):
            path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            files[path] = f"{a},{b}"
    return files


NODES = "sys/devices/system/node"


def test_siblings_and_affinity(probe: Path, tmp_path: Path) -> None:
    files = siblings([(0, 4), (1, 5), (2, 6), (3, 7)])
    files |= {f"{NODES}/node0/cpulist": "0-1,4-5", f"{NODES}/node10/cpulist": "2-3,6-7"}
    files |= {f"{NODES}/node2/cpulist": "", f"{NODES}/online": "0,2,10"}  # 2: memory only
    root = write(tmp_path, files)

    def below(allowed: str) -> str:
        return ask(probe, "topology_below", root, allowed)

    assert below("0-7") == "0 2: 0 1 4 5\n10 2: 2 3 6 7"
    assert below("0,5-7") == "0 2: 0 5\n10 2: 6 7"  # a sibling alone stands for its core
    assert below("2,3,6") == "10 2: 2 3 6"
    assert below("0-9") == below("0-7")  # CPUs of no node


def test_strange_sysfs(probe: Path, tmp_path: Path) -> None:
    def below(files: dict[str, str], name: str) -> str:
        return ask(probe, "topology_below", write(tmp_path / name, files), "0-1")

    (tmp_path / "none").mkdir()
    assert below({}, "none") == "0 2: 0 1"
    assert below({f"{NODES}/node0/cpulist": "what?"}, "text") == "0 2: 0 1"
    assert below({f"{NODES}/node0/cpulist": "0-4294967295"}, "huge") == "0 2: 0 1"
    assert below({f"{NODES}/node0/other": "0"}, "no_list") == "0 2: 0 1"
    assert below({f"{NODES}/nodes/cpulist": "0"}, "name") == "0 2: 0 1"
    assert below({NODES: "a file"}, "file") == "0 2: 0 1"
    assert below({f"{NODES}/node0/cpulist": "0-1", **siblings([(0, 9), (7, 8)])}, "sib") == (
        "0 2: 0 1"
    )


# --- CPU quota --------------------------------------------------------------------------------

NO_QUOTA = 1 << 20


def v1(where: str, quota: int, period: int = 100000) -> dict[str, str]:
    base = f"sys/fs/cgroup/{where}"
    return {f"{base}/cpu.cfs_quota_us": str(quota), f"{base}/cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 2),
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, NO_QUOTA),
        (
            "0::/a/b",
            {
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
            },
            3,
        ),
        ("0::/", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ("0::/host/path", {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4),  # inside a container
        ("0::/../..", {}, NO_QUOTA),
        ("0::/", {"sys/fs/cgroup/cpu.max": "lots"}, NO_QUOTA),
        ("0::/", {"sys/fs/cgroup/cpu.max": "100000 0"}, NO_QUOTA),
        ("0::/", {"sys/fs/cgroup/cpu.max": "9000000000000000000 1"}, NO_QUOTA),
        ("1:cpu:/g", v1("cpu/g", 250000), 3),
        ("4:cpu,cpuacct:/g\n0::/", v1("cpu,cpuacct/g", 200000), 2),
        ("4:cpu,cpuacct:/docker/x", v1("cpu,cpuacct", 100001), 2),
        ("1:cpu:/g", v1("cpu/g", -1), NO_QUOTA),
        ("1:cpuset:/g", v1("cpuset/g", 100000), NO_QUOTA),
        ("rubbish\n::\n", {}, NO_QUOTA),
    ],
)
def test_cpu_quota(
    probe: Path, tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    root = write(tmp_path, {"proc/self/cgroup": groups, **files})
    assert int(ask(probe, "quota_below", root)) == expected


def test_cpu_quota_of_this_machine(probe: Path, tmp_path: Path) -> None:
    assert int(ask(probe, "quota")) >= 1
    assert int(ask(probe, "quota_below", tmp_path)) == NO_QUOTA  # no /proc, no /sys


# --- CPU features -----------------------------------------------------------------------------

FEATURES = {
    0: {"avx", "avx2", "fma", "f16c", "bmi2"},
    1: {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    2: {"avx512_vnni"},
    3: {"avx512vbmi"},
    4: {"avx512_bf16"},
    5: {"amx_tile"},
    6: {"amx_int8"},
    7: {"amx_bf16"},
    8: {"avx_vnni"},
}


def test_cpu_features_agree_with_the_kernel(probe: Path) -> None:
    info = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags\s*:(.*)$", info, re.M)[1].split())
    values, brand = ask(probe, "features").splitlines()
    first, second = map(int, values.split())
    assert first == second
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.M)
    if model:
        assert brand == model[1].strip()
    for bit, names in FEATURES.items():
        amx = any(name.startswith("amx") for name in names)
        if amx and names <= flags and not first & (1 << 5):
            continue  # the CPU has tiles, the system refused the permission
        assert bool(first & (1 << bit)) == (names <= flags), names


# --- memory and bandwidth ---------------------------------------------------------------------


def test_mappings(probe: Path) -> None:
    assert ask(probe, "mappings") == ""
    assert ask(probe, "mappings", topology="0:0;1:1") == ""


@pytest.mark.parametrize("topology", [None, "0:0;1:1"])
def test_bandwidth(probe: Path, topology: str | None) -> None:
    rows = [line.split() for line in ask(probe, "bandwidth", 3, topology=topology).splitlines()]
    assert [int(threads) for threads, _ in rows] == [1, 2, 3]
    assert all(float(rate) > 1e8 for _, rate in rows)


def test_bandwidth_refuses_no_threads(probe: Path) -> None:
    result = subprocess.run([probe, "bandwidth", "0"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "max_threads = 0" in result.stderr


def test_how_long_spins_are_left_out(tmp_path: Path) -> None:
    program = build(tmp_path / "crowding_test", [CPP / "crowding_test.cpp"], ["-O0"])
    result = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout
