"""Processes of benchmarks/waves.py: they load side by side, and are timed one at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def waves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import waves

    yield waves
    del sys.modules["waves"]


def task(number: int, place: Path, quiet: Any) -> Iterator[Any]:
    """Writes down when it begins and ends what must run alone."""

    def alone(what: str) -> None:
        begin = time.monotonic()
        time.sleep(0.05)
        (place / f"{what}-{number}").write_text(f"{begin} {time.monotonic()}")

    quiet.alone(alone)("packed")
    (place / f"loaded-{number}").touch()
    if number == 2:
        raise ValueError("out of luck")
    quiet(alone)("measured")
    yield
    alone("timed")
    yield {"number": number}


def spans(place: Path, what: str) -> list[tuple[float, float]]:
    found = [tuple(map(float, path.read_text().split())) for path in place.glob(f"{what}-*")]
    return sorted((begin, end) for begin, end in found)


def test_one_at_a_time(waves: Any, tmp_path: Path) -> None:
    tasks = [(f"task {n}", task, (n, tmp_path)) for n in (0, 1, 3)]
    found = dict(waves.Wave(tasks, "fork", 60, measured=3))
    assert {name: row["number"] for name, row in found.items()} == {
        "task 0": 0,
        "task 1": 1,
        "task 3": 3,
    }
    assert all(row["start_seconds"] > 0 for row in found.values())
    for what in ("packed", "measured", "timed"):
        times = spans(tmp_path, what)
        assert len(times) == 3
        assert all(end <= begin for (_, end), (begin, _) in zip(times, times[1:], strict=False))
    # Nothing is measured before all have packed, and nothing is timed before all were measured.
    assert spans(tmp_path, "packed")[-1][1] <= spans(tmp_path, "measured")[0][0]
    assert spans(tmp_path, "measured")[-1][1] <= spans(tmp_path, "timed")[0][0]


def test_a_process_that_fails(
    waves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others are measured and timed all the same."""
    monkeypatch.setattr(waves, "_PATIENCE", 0.5)
    tasks = [(f"task {n}", task, (n, tmp_path)) for n in (1, 2)]
    found = dict(waves.Wave(tasks, "fork", 60, measured=2))
    assert "ValueError: out of luck" in found["task 2"]["error"]
    assert found["task 1"]["number"] == 1 and len(spans(tmp_path, "measured")) == 1
    assert "a process did not come" in capfd.readouterr().out


def test_a_process_that_takes_too_long(waves: Any, tmp_path: Path) -> None:
    def slow(quiet: Any) -> Iterator[Any]:
        time.sleep(60)
        yield

    begin = time.monotonic()
    assert list(waves.Wave([("slow", slow, ())], "fork", 0.3)) == [
        ("slow", {"error": "it took too long"})
    ]
    assert time.monotonic() - begin < 30


def test_a_process_that_ends_before_it_is_timed(waves: Any, tmp_path: Path) -> None:
    def ends(quiet: Any) -> Iterator[Any]:
        threading.Timer(0.3, os._exit, (1,)).start()
        yield

    tasks = [("ends", ends, ()), ("task 0", task, (0, tmp_path))]
    wave = waves.Wave(tasks, "fork", 60, measured=1)
    wave._running[0][1].join(20)
    found = dict(wave)
    assert found["ends"]["error"] == "its process ended" and found["task 0"]["number"] == 0


def test_a_wave_that_is_not_timed_to_its_end(waves: Any, tmp_path: Path) -> None:
    """Nothing is left behind if what handles a result fails."""
    wave = waves.Wave([(f"task {n}", task, (n, tmp_path)) for n in (0, 1)], "fork", 60, measured=2)
    with contextlib.closing(iter(wave)) as results:
        assert next(results)[0] == "task 0"
    assert [process.exitcode for _, process, _ in wave._running] == [-signal.SIGKILL] * 2
