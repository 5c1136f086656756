"""benchmarks/cache_timeline.py runs; fixed placements are timed as by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cache_timeline.py"


def rows(*arguments: str) -> list[list[float]]:
    given = ["--tokens", "120", "--layers", "2", "--experts", "64", "--slots", "16", *arguments]
    command = [sys.executable, SCRIPT, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [
        [float(cell.strip().rstrip("%")) for cell in line.strip("| \n").split("|")]
        for line in done.stdout.splitlines()[2:]
    ]


def test_a_fixed_placement() -> None:
    """8 routes of a token and layer, of which each one that is missed takes 1 ms."""
    times = "--rest", "2", "--layer", "3", "--hot", "0", "--miss", "1"
    [[slots, share, hits, uploads, milliseconds, _, faster]] = rows("--share", "0", *times)[:1]
    missed = 8 * (1 - hits / 100)
    assert (slots, share, uploads, faster) == (16, 0, 0, 1)
    assert milliseconds == pytest.approx(2 + 2 * (3 + missed), rel=0.01)


def test_more_of_the_bus_makes_more_hits() -> None:
    fixed, little, whole = rows("--share", "0.02", "1", "--beside", "0")
    assert fixed[2] < little[2] < whole[2] and fixed[4] > little[4] > whole[4]
    assert 1 < little[6] < whole[6] and 0 < little[3] < whole[3]


def test_hot_experts_hide_missed_ones() -> None:
    """With as much time for hot experts as all eight would take on the CPU, hits gain nothing."""
    fixed, moving = rows("--share", "0.5", "--hot", "2", "--miss", "0.25", "--beside", "0")
    assert fixed[4] == moving[4] and fixed[2] < moving[2]
