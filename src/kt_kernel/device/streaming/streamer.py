"""Copies experts to memory of a fixed size on the GPU, one group after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.text import shown_size
from .experts import Biases, PackedExperts, SlotGroup
from .timeline import GroupStamps, LayerStamps

_HALVES = 2


@dataclass(frozen=True)
class Group:
    """Experts whose weights are on the device, for what is computed before the next group.

    Attributes:
        slots: the experts; slot i has the weights w13[i] and w2[i].
        w13: [n, 2 I, H], gate's rows and then up's, or both in turn if they are interleaved. n is
            the room of a group, for every group: engines compile and tune their kernels by it.
            Experts beyond `slots` are anything.
        w2: [n, H, I].
        biases: of the slots, for w13 and w2; None if there are none.
    """

    slots: Sequence[int]
    w13: torch.Tensor
    w2: torch.Tensor
    biases: Biases | None = None


class _Half:
    """One of the two areas for packed experts, and when it may be read and written."""

    def __init__(self, lane: Any, memory: torch.Tensor) -> None:
        self.memory = memory
        self.arrived = lane.event()  # its experts are there
        self.unpacked = lane.event()  # they are no longer needed


class ExpertStreamer:
    """The memory on one device through which the layers' experts pass.

    Packed experts have two areas: while the experts in one are unpacked and multiplied, the next
    ones are copied to the other. Unpacked experts have one area, because unpacking and products
    follow each other on the caller's stream. The areas are shared by all layers, so the first
    copies of a layer run while the layer before is still computed, if the host is far enough ahead.

    lane: a `lane.CopyLane`. memory: bytes to use on the device. like: a layer whose ratio of packed
    and unpacked bytes decides how the memory is divided. dtype: of the unpacked weights. Raises
    ValueError if the memory is too small for one expert, and torch.OutOfMemoryError.
    """

    def __init__(
        self, lane: Any, memory: int, like: PackedExperts, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._lane, self._dtype = lane, dtype
        packed, values, held = like.expert_bytes, like.expert_values, len(like.held)
        needed = _HALVES * packed + values * dtype.itemsize
        if memory < needed:
            raise ValueError(
                f"{shown_size(memory, down=True)} on {lane.device} are too little to stream "
                f"experts; one expert of these layers needs {shown_size(needed)}"
            )
        groups = -(-held // min(memory // needed, held))
        experts = -(-held // groups)  # no more than groups of equal size need
        self._halves = [
            _Half(lane, torch.empty(experts * packed, dtype=torch.uint8, device=lane.device))
            for _ in range(_HALVES)
        ]
        self._weights = torch.zeros(experts * values, dtype=dtype, device=lane.device)
        self._used = lane.event()  # the unpacked weights are no longer needed
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._weights.nbytes + sum(half.memory.nbytes for half in self._halves)

    def room(self, layer: PackedExperts) -> int:
        """How many experts of a layer a group has, at most."""
        packed = self._halves[0].memory.nbytes // layer.expert_bytes
        return min(packed, self._weights.numel() // layer.expert_values)

    def need_room(self, layer: PackedExperts) -> int:
        """`room`, which is at least 1. ValueError if no expert fits."""
        room = self.room(layer)
        if room < 1:
            raise ValueError(
                f"an expert of {shown_size(layer.expert_bytes)} does not fit into the memory for "
                f"streamed experts on {self._lane.device}"
            )
        return room

    def stream(
        self, layer: PackedExperts, slots: Sequence[int], stamps: LayerStamps | None = None
    ) -> Iterator[Group]:
        """Copies experts of a layer; yields them in groups, in the order of memory.

        The first copies start at once, and the host never waits. A group's weights are valid for
        what the caller puts on its current stream before it asks for the next group. Iterate over
        one layer before the next call. stamps: gets the times of the groups.

        Raises ValueError for experts that are not on the CPU, and if no expert of the layer fits.
        """
        groups = layer.grouped(slots, self.need_room(layer))
        return self._groups(
            layer, groups, [self._copy(layer, g, stamps) for g in groups[:_HALVES]], stamps
        )

    def _groups(
        self,
        layer: PackedExperts,
        groups: list[SlotGroup],
        halves: list[_Half],
        stamps: LayerStamps | None,
    ) -> Iterator[Group]:
        """Unpacks groups one by one. halves: where the first of them were copied to."""
        for number, wanted in enumerate(groups):
            times = None if stamps is None else stamps.groups[number]
            group = self._unpacked(layer, wanted, halves[number], times)
            halves += [self._copy(layer, more, stamps) for more in groups[len(halves) :][:1]]
            try:
                yield group
            finally:
                self._lane.record_compute(self._used)
                if times is not None:
                    times.done = self._lane.stamp_compute()

    def _copy(self, layer: PackedExperts, group: SlotGroup, stamps: LayerStamps | None) -> _Half:
        """Starts copying a group to the next half."""
        lane, half = self._lane, self._halves[self._turn]
        self._turn = (self._turn + 1) % _HALVES
        lane.delay_copies(half.unpacked)
        begin = None if stamps is None else lane.stamp_copies()
        staged = self._staged(layer, half, len(group.slots))
        for part, to in zip(layer.parts, staged, strict=True):
            lane.copy(to, part.memory, group.runs)
        lane.record_copies(half.arrived)
        if stamps is not None:
            count = len(group.slots)
            nbytes = count * layer.expert_bytes
            stamps.groups.append(GroupStamps(count, nbytes, begin, lane.stamp_copies()))
        return half

    def _unpacked(
        self, layer: PackedExperts, wanted: SlotGroup, half: _Half, times: GroupStamps | None
    ) -> Group:
        """Unpacks a group that was copied to a half."""
        lane, n, room = self._lane, len(wanted.slots), self.room(layer)
        hidden, inter = layer.hidden, layer.inter
        w13, w2 = self._weights[: room * layer.expert_values].split(
            [2 * room * inter * hidden, room * hidden * inter]
        )
        w13, w2 = w13.view(room, 2 * inter, hidden), w2.view(room, hidden, inter)
        group = Group(wanted.slots, w13, w2, wanted.biases)
        lane.delay_compute(self._used)
        if times is not None:
            times.wait = lane.stamp_compute()
        lane.delay_compute(half.arrived)
        if times is not None:
            times.go = lane.stamp_compute()
        layer.unpack(self._staged(layer, half, n), group.w13[:n], group.w2[:n])
        lane.record_compute(half.unpacked)
        return group

    def _staged(self, layer: PackedExperts, half: _Half, n: int) -> list[torch.Tensor]:
        """For each part of a layer, the area for n experts in a half."""
        staged, begin = [], 0
        for part in layer.parts:
            end = begin + n * part.expert_bytes
            staged.append(half.memory[begin:end].view(n, part.expert_bytes))
            begin = end
        return staged
