"""Converts the GPU's clock to the CPU's."""

from __future__ import annotations

from collections.abc import Sequence

from .records import Record

_SPAN = 10**9  # nanoseconds; the clocks drift by at most some microseconds in this time


class Offset:
    """``value``: what to add to the GPU's nanoseconds to get the CPU's; None: not known yet.

    Cause comes before effect. The poller sees an entry after the GPU has handed it over, so the
    offset is at most seen - hand_end; the GPU sees an answer after it was written, so it is at
    least rung - back_ready. The clocks drift, so only what happened in the last second tells: a
    record ends with the next batch in the same buffers, of prompts perhaps minutes later.
    """

    def __init__(self) -> None:
        self.value: int | None = None

    def update(self, records: Sequence[Record]) -> None:
        """Takes the middle between the largest lower and the smallest upper bound, also where they
        cross, as drift makes them do. Where there is one only, the last value is kept as far as
        that allows; without any it is kept."""
        low = high = None
        oldest = max((max(record.seen, record.rung) for record in records), default=0) - _SPAN
        for record in records:
            if record.hand_end and record.seen and record.seen >= oldest:
                bound = record.seen - record.hand_end
                high = bound if high is None else min(high, bound)
            if record.back_ready and record.rung and record.rung >= oldest:
                bound = record.rung - record.back_ready
                low = bound if low is None else max(low, bound)
        if low is not None and high is not None:
            self.value = (low + high) // 2
        elif high is not None:
            self.value = high if self.value is None else min(self.value, high)
        elif low is not None:
            self.value = low if self.value is None else max(self.value, low)
