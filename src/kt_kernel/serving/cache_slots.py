"""Which expert is in which slot of a layer while experts move: the host's view.

A slot goes through these states:

    in use    the device's map may contain it
    leaving   the published map does not contain it, but the device may still use an older one.
              Maps are published at any time, also while the device copies one
    free      no kernel can read it
    arriving  its new expert is being copied
    arrived   its weights are complete, and the next map will contain it
"""

from __future__ import annotations

import numpy as np

from ..moe.placement import COLD, Placement


class LayerSlots:
    """The slots of one layer. wanted: int32 [E], the map to publish, changed in place.

    Attributes:
        resident: bool [E]: experts that have a slot or are about to get one, and that stay.
        evictable: bool [E]: experts that `evict` accepts.
        free: slots that no kernel can read, and that no expert is copied to.

    Methods raise ValueError for a move that the states above do not allow.
    """

    def __init__(self, placement: Placement, wanted: np.ndarray) -> None:
        wanted[:] = placement.slots
        self.wanted = wanted
        self.num_slots = placement.num_slots
        self.version = 0  # of the published map
        used = set(placement.slots)
        self.free = [slot for slot in range(placement.num_slots) if slot not in used]
        self._leaving: list[tuple[int, int]] = []  # the first version without it, and the slot
        self._evicted: list[int] = []  # experts that the next map will not contain
        self._arriving: dict[int, int] = {}  # slot -> expert
        self._arrived: dict[int, int] = {}
        self.resident: np.ndarray = wanted != COLD
        self.evictable = self.resident.copy()

    def share(self, resident: np.ndarray, evictable: np.ndarray) -> None:
        """Keeps the attributes of these names in the given memory from now on: bool [E]."""
        resident[:], evictable[:] = self.resident, self.evictable
        self.resident, self.evictable = resident, evictable

    @property
    def coming_free(self) -> int:
        """Slots that are free, or will be without a further eviction."""
        return len(self.free) + len(self._leaving) + len(self._evicted)

    def evict(self, expert: int) -> None:
        """The next map will not contain the expert."""
        if not self.evictable[expert]:
            raise ValueError(f"expert {expert} is in no slot")
        self.evictable[expert] = self.resident[expert] = False
        self._evicted.append(expert)

    def upload(self, expert: int) -> int:
        """Takes a free slot for an expert whose copy begins now."""
        if self.resident[expert] or self.wanted[expert] != COLD:
            raise ValueError(f"expert {expert} has a slot already")
        if not self.free:
            raise ValueError("no slot is free")
        slot = self.free.pop()
        self._arriving[slot] = expert
        self.resident[expert] = True
        return slot

    def uploaded(self, slot: int) -> None:
        """The copy to a slot is complete."""
        if slot not in self._arriving:
            raise ValueError(f"no expert is copied to slot {slot}")
        self._arrived[slot] = self._arriving.pop(slot)

    def next_map(self, in_use: int) -> bool:
        """Changes `wanted` if there is something new. in_use: a version that the device uses, or
        has used. Returns whether the map is to be published."""
        while self._leaving and self._leaving[0][0] <= in_use:
            self.free.append(self._leaving.pop(0)[1])
        if not self._evicted and not self._arrived:
            return False
        self.version += 1
        for expert in self._evicted:
            self._leaving.append((self.version, int(self.wanted[expert])))
            self.wanted[expert] = COLD
        self._evicted = []
        for slot, expert in self._arrived.items():
            self.wanted[expert] = slot
            self.evictable[expert] = True
        self._arrived = {}
        return True

    def placement(self) -> Placement:
        """The published placement."""
        return Placement(tuple(self.wanted.tolist()), self.num_slots)
