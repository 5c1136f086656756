"""When streamed layers were copied and computed, for KT_TRACE."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...trace.records import StreamedGroup, StreamedRecord

_DRIFT = 20e-6  # of the GPU's clock against the CPU's, at most
_REBASE = 10**9  # nanoseconds after which times are counted from a later event: they are float32


@dataclass
class Stamp:
    """A moment on a stream. event: a CUDA event with a time. launched: the CPU's clock before the
    event was recorded, in nanoseconds."""

    event: Any
    launched: int

    def reached(self) -> bool:
        return self.event.query()

    def after(self, other: Stamp) -> int:
        """Nanoseconds since the other stamp. Both were reached."""
        return int(other.event.elapsed_time(self.event) * 1e6)


@dataclass
class GroupStamps:
    """Of a group of experts. begin, end: of the copies; wait, go: the GPU's wait for them; done: of
    the products."""

    experts: int
    nbytes: int
    begin: Stamp | None = None
    end: Stamp | None = None
    wait: Stamp | None = None
    go: Stamp | None = None
    done: Stamp | None = None

    def all(self) -> Iterator[Stamp]:
        for stamp in (self.begin, self.end, self.wait, self.go, self.done):
            assert stamp is not None
            yield stamp


@dataclass
class LayerStamps:
    """Of one batch of one layer. on_cpu: experts that the CPU computes, see `StreamedRecord`."""

    layer: str
    position: int
    chain: int
    tokens: int
    experts: int
    on_cpu: int
    begin: Stamp
    end: Stamp | None = None
    groups: list[GroupStamps] = field(default_factory=list)


class Timeline:
    """The streamed layers of one device.

    All calls come from the thread that launches batches, never during a capture: another thread
    must not ask for events meanwhile. So the times of a layer are known when a later batch starts.

    lane: a `lane.CopyLane`. sink: takes the times of each layer.
    """

    def __init__(self, lane: Any, sink: Callable[[StreamedRecord], None]) -> None:
        self._lane, self._sink = lane, sink
        self._open: deque[LayerStamps] = deque()
        self._number = 0
        self._base: Stamp | None = None
        self._base_time = 0
        self._offset: int | None = None  # the CPU's clock minus the GPU's
        self._offset_time = 0

    def start(self, **about: Any) -> LayerStamps:
        """Begins a layer; the keywords are the first fields of `LayerStamps`."""
        self.collect()
        while self._open and self._open[-1].end is None:  # an exception ended it
            self._open.pop()
        layer = LayerStamps(**about, begin=self._lane.stamp_compute())
        self._open.append(layer)
        return layer

    def collect(self) -> None:
        """Passes on the layers that are finished."""
        while self._open and (end := self._open[0].end) is not None and end.reached():
            self._sink(self._record(self._open.popleft(), end))

    def _record(self, layer: LayerStamps, end: Stamp) -> StreamedRecord:
        if self._base is None:
            self._base = layer.begin
        base, base_time = self._base, self._base_time
        stamps = [layer.begin, end, *(s for group in layer.groups for s in group.all())]
        times = [base_time + stamp.after(base) for stamp in stamps]
        self._update_offset(stamps, times)
        if times[1] - base_time > _REBASE:
            self._base, self._base_time = end, times[1]
        assert self._offset is not None
        shown = [moment + self._offset for moment in times]
        self._number += 1
        return StreamedRecord(
            layer=layer.layer,
            position=layer.position,
            chain=layer.chain,
            number=self._number,
            tokens=layer.tokens,
            experts=layer.experts,
            on_cpu=layer.on_cpu,
            start=shown[0],
            end=shown[1],
            groups=tuple(
                StreamedGroup(group.experts, group.nbytes, *shown[at : at + 5])
                for at, group in zip(range(2, len(shown), 5), layer.groups, strict=True)
            ),
        )

    def _update_offset(self, stamps: list[Stamp], times: list[int]) -> None:
        """Nothing happens before it was launched, and copies begin at once if the bus is idle, as
        in a prompt's first layer. So the offset is about the largest difference that was seen,
        less what the clocks may have drifted since."""
        low = max(stamp.launched - moment for stamp, moment in zip(stamps, times, strict=True))
        now = time.monotonic_ns()
        if self._offset is not None:
            low = max(low, self._offset - int((now - self._offset_time) * _DRIFT))
        self._offset, self._offset_time = low, now
