"""Records of one batch of one layer: the compiled core's, and those of streamed experts."""

from __future__ import annotations

from typing import NamedTuple


class Record(NamedTuple):
    """All are ints, times in nanoseconds. 0: there was no such moment, or it is not known.

    The core gives tuples in this order. hand_* and back_* are of the GPU's clock, the others of the
    CPU's steady one.
    """

    slot: int  # the layer and its buffers
    number: int  # of the entry: uint32, incremented by one per device
    position: int  # the layer's place in its model's order, from 0
    chain: int  # number of the model
    tokens: int
    hand_start: int  # hand_over began
    hand_end: int
    seen: int  # the poller took the entry
    rung: int  # the done word was written
    begun: int  # immediate experts: their job on the pool
    ended: int
    late_begun: int  # deferred experts: theirs
    late_ended: int
    back_start: int  # take_back began
    back_ready: int  # and saw the answer
    back_end: int


class StreamedGroup(NamedTuple):
    """Experts that were copied to the GPU together. Times are of the CPU's clock, in
    nanoseconds."""

    experts: int
    nbytes: int
    copy_start: int
    copy_end: int
    wait_start: int  # the GPU has nothing else to do for this layer
    wait_end: int
    done: int  # unpacked and multiplied


class StreamedRecord(NamedTuple):
    """One batch of one layer, some of whose experts were streamed."""

    layer: str
    position: int
    chain: int
    number: int  # of the streamed layers of a device, from 1
    tokens: int
    experts: int  # streamed
    on_cpu: int  # experts with tokens that the CPU computed
    start: int  # on the GPU, before the first product
    end: int  # after the last one; the CPU's sum may still be missing
    groups: tuple[StreamedGroup, ...]
