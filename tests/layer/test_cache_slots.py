"""The slots of a layer under any order of events, with a device that takes maps into use late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kt_kernel.moe.placement import COLD, Placement
from kt_kernel.serving.cache_slots import LayerSlots

E, SLOTS = 6, 3


class Device:
    """Slots with the number of the expert whose weights they have, and a batch that reads them."""

    def __init__(self, slots: LayerSlots) -> None:
        self.weights = dict(enumerate(range(SLOTS)))
        self.live = slots.wanted.copy()
        self.published = [(0, self.live)]
        self.version = 0
        self.reads: dict[int, int] = {}  # expert -> slot, of the batch that runs

    def begin(self, at: int, later: list[bool]) -> None:
        """A batch takes the map published ``at`` places before the last one into use; the batch
        before is done. later: rows that it reads only after the last map was published."""
        self.version, found = self.published[max(0, len(self.published) - 1 - at)]
        self.live = np.where(later, self.published[-1][1], found)
        self.published = self.published[-1:]  # the next batch cannot read an older one
        self.reads = {e: int(slot) for e, slot in enumerate(self.live) if slot != COLD}


class Moves(RuleBasedStateMachine):
    """A host that moves experts at any time, and a device that starts batches at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = LayerSlots(Placement.first(E, SLOTS), np.empty(E, np.int32))
        self.device = Device(self.slots)
        self.copies: list[tuple[int, int]] = []

    @rule(
        at=st.integers(0, 2),
        later=st.lists(st.booleans(), min_size=E, max_size=E),
        mixed=st.booleans(),
    )
    def batch(self, at: int, later: list[bool], mixed: bool) -> None:
        self.device.begin(at if mixed else 0, later)

    @rule(data=st.data())
    @precondition(lambda self: self.slots.evictable.any())
    def evict(self, data: Any) -> None:
        self.slots.evict(
            int(data.draw(st.sampled_from(list(np.flatnonzero(self.slots.evictable)))))
        )

    @rule(data=st.data())
    @precondition(lambda self: self.slots.free)
    def upload(self, data: Any) -> None:
        there = self.slots.resident | (self.slots.wanted != COLD)
        expert = int(data.draw(st.sampled_from(list(np.flatnonzero(~there)))))
        slot = self.slots.upload(expert)
        self.device.weights[slot] = -1  # half written
        self.copies.append((slot, expert))

    @rule(data=st.data())
    @precondition(lambda self: self.copies)
    def arrive(self, data: Any) -> None:
        slot, expert = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        self.device.weights[slot] = expert
        self.slots.uploaded(slot)

    @rule()
    def publish(self) -> None:
        if self.slots.next_map(self.device.version):
            self.device.published.append((self.slots.version, self.slots.wanted.copy()))

    @invariant()
    def a_batch_reads_what_its_map_says(self) -> None:
        for expert, slot in self.device.reads.items():
            assert self.device.weights[slot] == expert

    @invariant()
    def maps_are_placements(self) -> None:
        self.slots.placement()
        used = [slot for slot in self.slots.wanted.tolist() if slot != COLD]
        everything = len(used) + len(self.copies) + len(self.slots.free)
        everything += len(self.slots._leaving) + len(self.slots._arrived)
        assert everything == SLOTS  # no slot is lost
        assert self.slots.resident.sum() + self.slots.coming_free == SLOTS


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_slot_is_not_free_before_the_device_uses_the_new_map() -> None:
    """The fault that the versions prevent."""
    slots = LayerSlots(Placement.first(E, SLOTS), np.empty(E, np.int32))
    slots.evict(1)
    assert slots.next_map(0) and slots.wanted[1] == COLD
    slots.evict(2)
    assert slots.next_map(0) and not slots.free
    with pytest.raises(ValueError, match="no slot is free"):
        slots.upload(4)
    assert not slots.next_map(1) and slots.free == [1]  # and not yet that of expert 2
    assert slots.upload(4) == 1


def test_moves_that_are_refused() -> None:
    slots = LayerSlots(Placement.first(E, SLOTS - 1), np.empty(E, np.int32))
    slots.evict(0)
    with pytest.raises(ValueError, match="expert 0 is in no slot"):
        slots.evict(0)
    with pytest.raises(ValueError, match="expert 5 is in no slot"):
        slots.evict(5)
    with pytest.raises(ValueError, match="expert 0 has a slot already"):
        slots.upload(0)
    with pytest.raises(ValueError, match="no expert is copied to slot 0"):
        slots.uploaded(0)
