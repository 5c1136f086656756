"""The compiled core's record of one batch of one layer."""

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
