"""Interleaved measurement: every line once per round, so that noise affects all alike."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Line:
    """One line of the result.

    Attributes:
        info: what is measured; copied to the result.
        bytes, operations: of one step; they determine what the ceilings allow.
        visit: measures for about this many seconds, at least one step, and returns the time of each
            step. None once the measured object is gone.
        limits: thread count of the ceilings.
        unit: name of the operations' ceiling; None if only memory matters.
        other_operations: those of other units, by the names of their ceilings.
        memory: name of the bytes' ceiling.
        beside: other work on the machine meanwhile: "", "torch" or "N foreign".
    """

    info: dict[str, Any]
    bytes: float
    operations: float
    visit: Callable[[float], list[float]] | None
    limits: int
    unit: str | None
    memory: str = "dram_read"
    beside: str = ""
    other_operations: dict[str, float] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    rounds: int = 0


def visitor(step: Callable[[], float]) -> Callable[[float], list[float]]:
    """A visit made of steps that each return their time. The first step of a visit warms up threads
    and code and does not count, unless steps are so long that this makes no difference."""
    last = 0.0

    def visit(seconds: float) -> list[float]:
        nonlocal last
        end = time.perf_counter() + seconds
        if last < 0.05:
            step()
        times = [step()]
        while time.perf_counter() < end:
            times.append(step())
        last = times[-1]
        return times

    return visit


def run_rounds(
    lines: Sequence[Line],
    rounds: int,
    seconds: float,
    deadline: float,
    after_round: Callable[[int], None],
) -> None:
    """Visits all lines `rounds` times, for `seconds` each in total, or less if the deadline (of
    time.monotonic) is near. Each line is visited at least once."""
    for number in range(rounds):
        for done, line in enumerate(lines):
            left = len(lines) * (rounds - number) - done
            allowed = max(0.0, deadline - time.monotonic()) / left
            with beside(line.beside):
                line.times += line.visit(min(seconds / rounds, allowed))
            line.rounds += 1
        after_round(number)
        if time.monotonic() >= deadline:
            return


_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Called in a child before it starts: it is killed when its parent dies, even while stopped."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Foreign:
    """Unrelated busy processes, stopped except inside `running`."""

    def __init__(self, count: int) -> None:
        busy = [sys.executable, "-S", "-c", "while True: pass"]
        self._processes = [subprocess.Popen(busy, preexec_fn=die_with_parent) for _ in range(count)]
        self._signal(signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        time.sleep(0.02)  # until the scheduler has spread them
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            os.kill(process.pid, number)


_foreign: dict[int, Foreign] = {}


@contextmanager
def beside(what: str) -> Iterator[None]:
    """Runs busy processes meanwhile for "N foreign". "torch" is handled by the line itself."""
    if not what.endswith(" foreign"):
        yield
        return
    count = int(what.split()[0])
    if count not in _foreign:
        _foreign[count] = Foreign(count)
    with _foreign[count].running():
        yield


def end_foreign() -> None:
    while _foreign:
        _foreign.popitem()[1].close()


_TORCH_WORK = torch.ones(1 << 20)


def wake_torch_pool() -> None:
    """Makes torch's threads compute; they then spin for a while, as next to an engine's own
    work."""
    _TORCH_WORK.add_(1)
