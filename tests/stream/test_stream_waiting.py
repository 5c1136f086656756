"""Calls of the stream engine that wait: Python goes on, and nobody waits longer than needed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from fake_gpu import DEADLINE, Gpu, Side, make_batch, make_layer
from kernels.turns import turns_during
from test_stream_faults import busy


class Stuck:
    """An engine whose last entry waits for work of about half a second, or a multiple of it."""

    def __init__(self, traces: bool = False, times: int = 1) -> None:
        self.layer = make_layer()
        self.gpu, self.side = Gpu(traces=traces), Side()
        self.slot = self.gpu.add(self.layer, self.side)
        self.work: list[Any] = busy(make_layer(hidden=256, inter=512), 500 * times)
        self.side.write(make_batch(2, 0))
        self.number = self.gpu.ring(self.slot)
        end = time.monotonic() + DEADLINE
        while not self.gpu.engine.stats()["immediate_jobs"]:  # until the entry's job is queued
            assert time.monotonic() < end, "the engine does not take the entry"
            time.sleep(0)

    @property
    def done(self) -> bool:
        return self.work[0][-1].done


def test_python_goes_on_while_an_engine_stops() -> None:
    stuck = Stuck()
    assert turns_during(stuck.gpu.engine.stop) > 2
    assert stuck.done and stuck.side.done[0] == stuck.number


def test_python_goes_on_while_an_engine_ends() -> None:
    """In whatever thread drops the last reference, the garbage collector's included."""
    stuck = Stuck()
    assert turns_during(lambda: delattr(stuck.gpu, "engine")) > 2
    assert stuck.done


def test_python_goes_on_while_an_engine_drains() -> None:
    stuck = Stuck()
    assert turns_during(lambda: stuck.gpu.engine.drain(30)) > 2
    assert stuck.done


@pytest.mark.parametrize("traces", [False, True])
def test_nothing_waits_for_an_engine_that_stops(traces: bool) -> None:
    stuck = Stuck(traces, times=6)  # the calls may take long on a busy machine
    stopping = [threading.Thread(target=stuck.gpu.engine.stop) for _ in range(3)]
    for thread in stopping:
        thread.start()
    while True:  # until the first has begun
        try:
            stuck.gpu.engine.raise_error()
        except RuntimeError as error:
            assert "was stopped" in str(error)
            break
    with pytest.raises(RuntimeError, match="the stream engine was stopped"):
        stuck.gpu.add(stuck.layer, stuck.side)
    assert stuck.gpu.engine.entries_of(stuck.slot) in (0, 1)
    stuck.gpu.engine.take_trace()
    stuck.gpu.engine.drop_slot(stuck.slot)
    assert not stuck.done, "the calls above waited for the work"
    for thread in stopping:
        thread.join()
    assert stuck.done and stuck.gpu.engine.pending() == 0
