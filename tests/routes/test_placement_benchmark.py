"""benchmarks/placement.py runs, and saves what it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kt_kernel.routes.synthetic import LOCALITIES, QWEN3_30B, generate

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "placement.py"


def test_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    generate(QWEN3_30B, tokens=12, layers=2).save(tmp_path / "record")
    sizes = "--tokens", "10", "--layers", "1", "--timed-tokens", "4"
    command = [sys.executable, SCRIPT, tmp_path / "out", "--record", tmp_path / "record", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved.keys() == {*LOCALITIES, "demo model", "timed"}
    assert {r["policy"] for r in saved["none"]["results"]} > {"LRU", "Belady", "first experts"}
    assert saved["demo model"]["tokens"] == 12 and saved["demo model"]["layers"] == 2
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.count("\n") == 2 + 5 * 5


@pytest.mark.parametrize("suffix", [".json", ".png"])
def test_both_files_are_checked_first(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"out{suffix}").mkdir()
    command = [sys.executable, SCRIPT, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and not done.stdout
    assert f"out{suffix}: exists and is not a regular file" in done.stderr
