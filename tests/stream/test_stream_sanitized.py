"""The stream tests once more, on the build with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

from pathlib import Path

from kernels.test_sanitized import run_sanitized

HERE = Path(__file__).parent


def test_streams_under_sanitizers() -> None:
    names = ("test_stream.py", "test_stream_faults.py", "test_stream_trace.py", "test_cuda_work.py")
    run_sanitized(*(HERE / name for name in names))
