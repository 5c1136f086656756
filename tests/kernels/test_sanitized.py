"""The kernel tests once more, on a build with AddressSanitizer and UndefinedBehaviorSanitizer.

KT_SANITIZED_MODULE names its file (`make test` builds it): the emulated module, so that the AVX-512
and AMX sources are covered on every machine. Sweeps are smaller than usual (core.py,
KT_SMALL_SWEEP). Threads have their own runs, with ThreadSanitizer too, in test_threads.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grid import examples

HERE = Path(__file__).parent


def library(name: str) -> str:
    """The sanitizer's run-time library, which must come first into the process."""
    command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run_sanitized(*arguments: object) -> None:
    """pytest, on the sanitized build; skips where there is none."""
    built = os.environ.get("KT_SANITIZED_MODULE")
    if not built:
        pytest.skip("KT_SANITIZED_MODULE is not set (make test sets it)")
    env = {
        **os.environ,
        "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
        # Python itself leaves memory to the system at exit.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "KT_EMUL_MODULE": built,
        "KT_SMALL_SWEEP": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=HERE.parents[1],
        env=env,
        capture_output=True,
        text=True,
        timeout=examples(800, full=7000),  # of whole grids, half an hour
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "test_products.py",
        "test_extremes.py",
        "test_accumulators.py",
        "test_pack.py",
        "test_pack_golden.py",
        "test_entries.py",
    ],
)
def test_kernels_under_sanitizers(module: str) -> None:
    run_sanitized("-k", "_C_emul", HERE / module)
