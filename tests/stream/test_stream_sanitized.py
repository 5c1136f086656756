"""The stream tests once more, on the build with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.test_sanitized import library

HERE = Path(__file__).parent


def test_streams_under_sanitizers() -> None:
    built = os.environ.get("KT_SANITIZED_MODULE")
    if not built:
        pytest.skip("KT_SANITIZED_MODULE is not set (make test sets it)")
    env = {
        **os.environ,
        "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaves memory to the system at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "KT_EMUL_MODULE": built,
        "KT_SMALL_SWEEP": "1",
    }
    modules = [HERE / name for name in ("test_stream.py", "test_stream_faults.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *modules],
        cwd=HERE.parents[1],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
