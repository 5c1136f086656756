"""Every entry of the compiled module, called with extremes: it raises, and the process lives on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .compiling import build_fake_driver
from .core import SMALL_SWEEP, module
from .entries.cases import cases, entries

ROOT = Path(__file__).resolve().parents[2]
MODULES = ["_C_emul"] if SMALL_SWEEP else ["_C", "_C_emul"]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_fake_driver(tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("name", MODULES)
def test_no_argument_ends_the_process(name: str, driver: str) -> None:
    core = module(name)
    if core is None:
        pytest.skip("KT_EMUL_MODULE is not set: the emulated kernels were not built")
    left = entries(core)
    assert sorted(cases(core, driver)) == left, "each entry needs a case"
    problems = []
    while left:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.entries"]
        done = subprocess.run(
            [*command, name, driver, *left],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        lines = done.stdout.splitlines()
        problems += [line for line in lines if line.startswith("PROBLEM")]
        if done.returncode:
            last = lines[-1] if lines else "nothing called"
            problems.append(f"exit code {done.returncode} after: {last}\n{done.stderr[-3000:]}")
        finished = sum(line.startswith("done ") for line in lines)
        left = left[finished + 1 :]  # goes on after the entry that ended the process
    assert not problems, "\n".join(problems)
