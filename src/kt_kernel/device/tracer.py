"""Writes what happened on a device to the file that KT_TRACE names."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from typing import Any

import torch

from ..runtime.background import start_thread
from ..trace.records import Record, StreamedRecord
from ..trace.writer import TRACE_VARIABLE, TraceWriter

_SECONDS = 0.5  # between writes: the process may be killed, and the clocks drift
_tracers: dict[torch.device, Tracer] = {}


class Tracer:
    """A thread that writes new records while the process runs; devices share the file.

    Attributes:
        streamed: takes streamed layers, from any thread.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self.streamed: deque[StreamedRecord] = deque()
        self._device = device
        self._core: Any = None
        self._writer = TraceWriter(path, str(device))
        self._names: dict[int, str] = {}
        self._last = 0  # number of the last record
        self._ending = threading.Event()
        self._thread = start_thread("kt-trace", self._run, self._ending.set)

    def attach(self, core: Any) -> None:
        """Writes the records of a device's stream engine, too."""
        self._core = core

    def name(self, slot: int, where: str) -> None:
        """Names the layer of a slot of the core."""
        self._names[slot] = where

    def close(self) -> None:
        """Writes the remaining records: all of them if the core was stopped."""
        if _tracers.get(self._device) is self:
            del _tracers[self._device]
        self._ending.set()
        self._thread.join()
        self._write()
        self._writer.close()

    def _run(self) -> None:
        while not self._ending.wait(_SECONDS):
            self._write()

    def _write(self) -> None:
        self._write_streamed()
        if self._core is None:
            return
        records = [Record(*row) for row in self._core.take_trace()]
        # A record ends with the next batch in the same buffers, so an older one may come later.
        records.sort(key=lambda record: (record.number - self._last + 2**31) % 2**32)
        if records:
            self._last = records[-1].number
            self._writer.write(records, lambda slot: self._names.get(slot, f"slot {slot}"))

    def _write_streamed(self) -> None:
        self._writer.write_streamed([self.streamed.popleft() for _ in range(len(self.streamed))])


def tracer_of(device: torch.device) -> Tracer | None:
    """The tracer of a device, made at the first call; None without KT_TRACE."""
    path = os.environ.get(TRACE_VARIABLE)
    if path and device not in _tracers:
        _tracers[device] = Tracer(path, device)
    return _tracers.get(device)


def _close_all() -> None:
    for tracer in list(_tracers.values()):
        tracer.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_tracers.clear)
