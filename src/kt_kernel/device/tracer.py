"""Writes the records of a device's stream engine to the file that KT_TRACE names."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..trace.records import Record
from ..trace.writer import TraceWriter

_SECONDS = 0.5  # between writes: the process may be killed, and the clocks drift


class Tracer:
    """A thread that writes new records while the process runs; devices share the file."""

    def __init__(self, core: Any, path: str, device: torch.device) -> None:
        self._core = core
        self._writer = TraceWriter(path, str(device))
        self._names: dict[int, str] = {}
        self._last = 0  # number of the last record
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kt-trace", daemon=True)
        self._thread.start()

    def name(self, slot: int, where: str) -> None:
        """Names the layer of a slot of the core."""
        self._names[slot] = where

    def close(self) -> None:
        """Writes the remaining records: all of them if the core was stopped."""
        self._ending.set()
        self._thread.join()
        self._write()
        self._writer.close()

    def _run(self) -> None:
        while not self._ending.wait(_SECONDS):
            self._write()

    def _write(self) -> None:
        records = [Record(*row) for row in self._core.take_trace()]
        # A record ends with the next batch in the same buffers, so an older one may come later.
        records.sort(key=lambda record: (record.number - self._last + 2**31) % 2**32)
        if records:
            self._last = records[-1].number
            self._writer.write(records, lambda slot: self._names.get(slot, f"slot {slot}"))
