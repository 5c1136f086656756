"""kt doctor: what it says of installations, engines and machines that are made up here."""

from __future__ import annotations

import resource
import subprocess
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_kernel import _conflict
from kt_kernel.cli import doctor
from kt_kernel.diagnosis import engines, environment, machine
from kt_kernel.diagnosis.finding import Finding, Level

VLLM, SGLANG = engines.ENGINES


def problem_of(findings: list[Finding]) -> str:
    """The text of the only finding, a problem."""
    (finding,) = findings
    assert finding.level is Level.PROBLEM
    return finding.text


# ---- the command


def test_the_whole_command(kt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SECONDS", 0.0)
    code, out, err = kt("doctor")
    subjects = [line.split()[1] for line in out.splitlines()]
    assert {"kt-moe", "CPUs", "memory", "folders"} <= set(subjects)
    assert (code == 1) == any(line.startswith("problem") for line in out.splitlines())
    assert not err


def test_problems_are_counted(kt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for look in ("package", "cpus", "memory", "folders"):
        monkeypatch.setattr(machine, look, lambda: [])
    monkeypatch.setattr(machine, "gpus", lambda: [Finding(Level.PROBLEM, "GPU", "gone")] * 2)
    monkeypatch.setattr(engines, "engines", lambda: [Finding(Level.NOTE, "vLLM", "old")])
    monkeypatch.setattr(environment, "environment", lambda: [])
    code, out, _ = kt("doctor")
    assert code == 1
    assert out.splitlines() == [
        "note     vLLM         old",
        *["problem  GPU          gone"] * 2,
        "kt: 2 problems, see above",
    ]
    assert doctor.doctor.__doc__


# ---- engines


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These distributions are not installed, others have version 1.2."""

    def version(name: str) -> str:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(metadata, "version", version)


def answering(monkeypatch: pytest.MonkeyPatch, output: str, error: str = "", code: int = 0) -> None:
    """The process that imports the engine ends like this."""
    done = SimpleNamespace(stdout=output, stderr=error, returncode=code)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ["one"])
    monkeypatch.delenv(VLLM.allowlist, raising=False)


def test_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "vllm", "sglang")
    assert "neither vLLM nor SGLang" in problem_of(engines.engines())


def test_only_installed_engines_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "sglang")
    answering(monkeypatch, '{"version": "1.2", "lacks": [], "notes": []}')
    (finding,) = engines.engines()
    assert (finding.level, finding.subject) == (Level.OK, "vLLM")
    assert finding.text.startswith("1.2: ")


def test_a_plugin_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    asked = []
    monkeypatch.setattr(metadata, "entry_points", lambda **given: asked.append(given) or ())
    assert "install kt-moe with pip" in problem_of(engines.look_at(SGLANG))
    assert asked == [{"group": "sglang.srt.plugins", "name": "kt_moe"}]


@pytest.mark.parametrize(
    ("listed", "left_out"), [("a,kt_moe", False), ("kt_moe , a", False), ("", False), ("a,b", True)]
)
def test_lists_of_plugins(monkeypatch: pytest.MonkeyPatch, listed: str, left_out: bool) -> None:
    without(monkeypatch)
    answering(monkeypatch, '{"version": "1.2", "lacks": [], "notes": []}')
    monkeypatch.setenv(VLLM.allowlist, listed)
    levels = [finding.level for finding in engines.look_at(VLLM)]
    assert levels == [Level.OK] + [Level.PROBLEM] * left_out


def test_differences_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    answering(monkeypatch, 'noise\n{"version": "3", "lacks": [], "notes": ["3 is not tested"]}\n')
    fine, said = engines.look_at(VLLM)
    assert (fine.level, said) == (Level.OK, Finding(Level.NOTE, "vLLM", "3 is not tested"))
    answering(monkeypatch, '{"version": "3", "lacks": ["a:b", "c", "d", "e", "f"], "notes": []}')
    assert "lacks a:b, c, d and 2 more, which" in problem_of(engines.look_at(VLLM))
    answering(monkeypatch, "", "Traceback\nImportError: libcuda.so.1\n", 1)
    text = "1.2: it cannot be imported: ImportError: libcuda.so.1"
    assert problem_of(engines.look_at(VLLM)) == text
    answering(monkeypatch, "", "", -9)
    assert "exit code -9" in problem_of(engines.look_at(VLLM))


def test_an_import_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    answering(monkeypatch, "")
    monkeypatch.setattr(subprocess, "run", run)
    assert "takes longer than 300 s" in problem_of(engines._differences(VLLM))


# ---- the machine


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = ["avx512", "avx2"]
    monkeypatch.setattr(machine, "native", lambda: SimpleNamespace(kernel_tables=lambda: tables))
    monkeypatch.setattr(machine, "kernel_table", lambda: "avx512")
    without(monkeypatch, "kt-kernel")
    assert machine.package()[0].text == "1.2, avx512 kernels, the best ones that this CPU runs"
    monkeypatch.setattr(machine, "kernel_table", lambda: "avx2")
    (finding,) = machine.package()
    assert finding.level is Level.NOTE and "keeps it from avx512" in finding.text
    without(monkeypatch, "kt-kernel", "kt-moe")
    assert "no engine finds its plugin" in problem_of(machine.package())
    monkeypatch.setattr(_conflict, "both_installed", lambda: "both are installed")
    assert problem_of(machine.package()) == "both are installed"


@pytest.mark.parametrize(
    ("everything", "quota", "busy", "said"),
    [
        (4, 4, None, []),
        (8, 4, None, ["leave 4 cores of 8 CPUs"]),
        (4, 3, None, ["leave 3 cores of 4 CPUs"]),
        (4, 4, "others used 50% of the CPUs during the measurement", ["50% of the CPUs for 0 s"]),
    ],
)
def test_cpus(
    monkeypatch: pytest.MonkeyPatch, everything: int, quota: int, busy: str | None, said: list[str]
) -> None:
    core = SimpleNamespace(topology=lambda: [(0, 4, 4)], cpu_quota=lambda: quota)
    monkeypatch.setattr(machine, "_SECONDS", 0)
    monkeypatch.setattr(machine, "native", lambda: core)
    monkeypatch.setattr(machine, "allowed_cpus", lambda: list(range(4)))
    monkeypatch.setattr(machine, "usable_cores", lambda nodes: min(4, quota))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: everything)
    monkeypatch.setattr(machine, "disturbance", lambda *_: busy)
    first, *notes = machine.cpus()
    assert first.level is Level.OK and "NUMA nodes 1" in first.text
    assert len(notes) == len(said)
    for note, words in zip(notes, said, strict=True):
        assert note.level is Level.NOTE and words in note.text


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and all that kernels need."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 << 30, 4 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A GPU")
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(Path(__file__).parent))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "Python.h")
    monkeypatch.delenv("CC", raising=False)
    without(monkeypatch)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_with_all_that_it_needs() -> None:
    gpu, triton = machine.gpus()
    assert (gpu.subject, gpu.text) == ("GPU 0", "A GPU: 3GB of 4GB free")
    assert triton.level is Level.OK


def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)


def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)


def _other_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")


def _no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_triton, "not installed"),
        (_no_compiler, "no C compiler (gcc, clang, cc)"),
        (_other_compiler, "no C compiler (/no/such/cc)"),
        (_no_headers, "Python.h is missing"),
    ],
)
def test_what_kernels_for_gpus_need(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], words: str
) -> None:
    change(monkeypatch)
    _, triton = machine.gpus()
    assert (triton.level, triton.subject) == (Level.PROBLEM, "Triton") and words in triton.text


@pytest.mark.usefixtures("one_gpu")
def test_memory_that_may_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 << 20, 64 << 20))
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 30)
    *_, locked = machine.gpus()
    assert locked.level is Level.NOTE and "ulimit -l allows 64MB" in locked.text


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    (finding,) = machine.gpus()
    assert finding.level is Level.NOTE
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA 13.0 finds no usable GPU" in problem_of(machine.gpus())


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    fine = [finding.text for finding in machine.folders()]
    assert fine == [
        f"{tmp_path}/new/cache/kt-moe: measurements",
        f"{tmp_path}/kt-moe: tuned options",
    ]
    looked = []
    monkeypatch.setattr(machine.os, "access", lambda path, how: looked.append(path))
    for finding in machine.folders():
        assert finding.level is Level.NOTE and "is not writable" in finding.text
    assert looked == [tmp_path, tmp_path]
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    for finding in machine.folders():
        assert finding.level is Level.NOTE and finding.text.startswith("no home folder")


# ---- the environment


@pytest.mark.parametrize(
    ("name", "value", "level", "words"),
    [
        ("KT_TRACE", "/tmp/trace", Level.OK, "KT_TRACE=/tmp/trace"),
        ("KT_CONFIG", '{"method": "BF16"}', Level.OK, "KT_CONFIG="),
        ("KT_CONFIG", '{"method": "BF15"}', Level.PROBLEM, "BF15: unknown method"),
        ("KT_CONFIG", "[", Level.PROBLEM, "KT_CONFIG"),
        ("KT_WATCHDOG_SECOND", "1", Level.NOTE, "did you mean KT_WATCHDOG_SECONDS?"),
        ("KT_X", "1", Level.NOTE, "KT_X: kt-moe does not know this variable"),
    ],
)
def test_variables(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, level: Level, words: str
) -> None:
    for known in list(environment.os.environ):
        if known.startswith("KT_"):
            monkeypatch.delenv(known)
    monkeypatch.setenv(name, value)
    (finding,) = environment.environment()
    assert finding.level is level and words in finding.text


def test_all_documented_variables_are_known() -> None:
    page = Path(__file__).parents[2] / "docs" / "options.md"
    table = page.read_text().partition("## Environment variables")[2]
    named = {
        word.partition("=")[0].strip("`,")
        for line in table.splitlines()
        if line.startswith("| `KT_")
        for word in line.split("|")[1].split()
    }
    assert named == set(environment.VARIABLES) - {"KT_TOPOLOGY"}
