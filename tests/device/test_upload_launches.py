"""Launches of uploads by the compiled core are those that Triton makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.compiling import build_fake_driver

pytest.importorskip("triton", reason="Triton is not installed")


def test_the_same_launches(tmp_path: Path) -> None:
    """Without a GPU: Triton compiles, and stand-ins launch."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    script = Path(__file__).with_name("upload_launches.py")
    done = subprocess.run(
        [sys.executable, script, build_fake_driver(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "the same launches" in done.stdout
