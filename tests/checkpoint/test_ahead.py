"""Reading ahead: in order, within its bound, and over when its user is."""

from __future__ import annotations

import threading
import time

import pytest

from kt_kernel.checkpoint import ahead
from kt_kernel.checkpoint.ahead import read_ahead


def readers() -> int:
    return sum(thread.name == "kt-read" for thread in threading.enumerate())


def settled(value, seconds: float = 0.05):
    """What the function gives once it has stopped changing."""
    last = value()
    while True:
        time.sleep(seconds)
        now = value()
        if now == last:
            return now
        last = now


@pytest.mark.parametrize(("bound", "most"), [(1, 1), (30, 3), (35, 4), (1000, 9)])
def test_it_reads_as_far_as_it_may(monkeypatch, bound, most):
    """Results of 10 bytes: another one is read while less than the bound waits."""
    monkeypatch.setattr(ahead, "AHEAD_BYTES", bound)
    read: list[int] = []

    def reading(key: int) -> int:
        read.append(key)
        return -key

    taken = 0
    for key, value in read_ahead(range(10), reading, lambda _: 10):
        assert (key, value) == (taken, -taken)
        taken += 1
        assert settled(lambda: len(read)) == min(10, taken + most)
    assert taken == 10 and readers() == 0


def test_what_waits_is_released(monkeypatch):
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 1)
    alive = 0

    class Result:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    for _, result in read_ahead(range(6), lambda _: Result(), lambda _: 10):
        del result
        assert settled(lambda: alive) <= 1
    assert alive == 0


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_an_error_comes_in_its_place(bad):
    def reading(key: int) -> int:
        if key == bad:
            raise ValueError(f"bad {key}")
        return key

    seen = []
    with pytest.raises(ValueError, match=f"bad {bad}"):
        for key, _ in read_ahead(range(6), reading, lambda _: 1):
            seen.append(key)
    assert seen == list(range(bad)) and readers() == 0


def test_an_error_of_the_keys():
    """Which would leave the other thread waiting for ever."""

    def keys():
        yield 0
        raise ValueError("no key")

    results = read_ahead(keys(), lambda key: key, lambda _: 1)
    assert next(results) == (0, 0)
    with pytest.raises(ValueError, match="no key"):
        next(results)
    assert readers() == 0


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_closing_waits_for_the_read_under_way(monkeypatch, taken):
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 1)
    busy = threading.Event()
    reads = []

    def reading(key: int) -> int:
        busy.set()
        time.sleep(0.05)
        busy.clear()
        reads.append(key)
        return key

    results = read_ahead(range(100), reading, lambda _: 10)
    for _ in range(taken):
        next(results)
    results.close()
    assert not busy.is_set() and readers() == 0 and len(reads) <= taken + 1


def test_nothing_to_read():
    assert list(read_ahead((), lambda key: key, lambda _: 1)) == []
