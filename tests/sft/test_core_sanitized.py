"""Training once more, on the build with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

from pathlib import Path

from kernels.test_sanitized import run_sanitized


def test_training_under_sanitizers() -> None:
    run_sanitized("-k", "_C_emul", Path(__file__).parent / "test_core.py")
