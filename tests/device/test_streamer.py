"""Copies of experts to the GPU and their order, on simulated streams that run in any order that
CUDA allows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel.device.streaming.experts import Run, SlotGroup
from kt_kernel.device.streaming.streamer import ExpertStreamer


class Event:
    """Counts its records: a wait is for the last record at the time of the call."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0


class Streams:
    """A `CopyLane` of two queues, run by `random` as late or as early as waits allow."""

    device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self.copies: deque[Any] = deque()
        self.computing: deque[Any] = deque()
        self._random = random.Random(seed)

    def event(self) -> Event:
        return Event()

    def _put(self, queue: deque, step: Callable[[], None], waits: tuple = ()) -> None:
        queue.append((waits, step))
        for _ in range(self._random.randrange(4)):
            self.run(1)

    def copy(self, to: torch.Tensor, source: torch.Tensor, runs: list[Run]) -> None:
        for run in runs:
            rows, there = source[run.at : run.at + run.count], to[run.to : run.to + run.count]
            assert rows.shape == there.shape
            self._put(self.copies, lambda rows=rows, there=there: there.copy_(rows))

    def compute(self, step: Callable[[], None]) -> None:
        self._put(self.computing, step)

    def _record(self, queue: deque, event: Event) -> None:
        event.recorded += 1
        number = event.recorded
        self._put(queue, lambda: setattr(event, "reached", number))

    def record_copies(self, event: Event) -> None:
        self._record(self.copies, event)

    def record_compute(self, event: Event) -> None:
        self._record(self.computing, event)

    def delay_copies(self, event: Event) -> None:
        self._put(self.copies, lambda: None, (event, event.recorded))

    def delay_compute(self, event: Event) -> None:
        self._put(self.computing, lambda: None, (event, event.recorded))

    def run(self, steps: int | None = None) -> None:
        """Runs steps of queues chosen at random; without a number, until nothing is left."""
        while steps is None or steps > 0:
            queues = [q for q in (self.copies, self.computing) if q and self._ready(q[0][0])]
            if not queues:
                assert steps is not None or not (self.copies or self.computing), "deadlock"
                return
            self._random.choice(queues).popleft()[1]()
            if steps is not None:
                steps -= 1

    @staticmethod
    def _ready(waits: tuple) -> bool:
        return not waits or waits[0].reached >= waits[1]


class Layer:
    """Stands in for PackedExperts: an expert is its number in all bytes, and as all weights."""

    hidden, inter = 4, 2
    expert_values = 3 * hidden * inter

    def __init__(self, streams: Streams, first: int, experts: int, parts: tuple[int, ...]) -> None:
        self.streams, self.first = streams, first
        numbers = torch.arange(first, first + experts, dtype=torch.uint8)[:, None]
        self.parts = [
            SimpleNamespace(memory=numbers.expand(experts, size).contiguous(), expert_bytes=size)
            for size in parts
        ]
        self.expert_bytes = sum(parts)
        self.held = list(range(experts))

    def grouped(self, slots: list[int], room: int) -> list[SlotGroup]:
        slots = sorted(slots)
        parts = [slots[i : i + room] for i in range(0, len(slots), room)]
        return [SlotGroup(part, [Run(s, i, 1) for i, s in enumerate(part)]) for part in parts]

    def unpack(self, staged: list[torch.Tensor], w13: torch.Tensor, w2: torch.Tensor) -> None:
        def step() -> None:
            for i in range(len(w13)):
                read = {int(value) for part in staged for value in part[i]}
                w13[i], w2[i] = min(read), max(read)

        self.streams.compute(step)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    most=st.integers(1, 5),
    parts=st.sampled_from([(8,), (3, 5)]),
    wanted=st.lists(st.sets(st.integers(0, 11), min_size=0), min_size=1, max_size=5),
)
def test_products_see_their_own_experts(seed: int, most: int, parts: tuple, wanted: list) -> None:
    streams = Streams(seed)
    layers = [Layer(streams, 20 * i, 12, parts) for i in range(len(wanted))]
    memory = most * (2 * 8 + Layer.expert_values * 4)
    streamer = ExpertStreamer(streams, memory, layers[0], torch.float32)
    assert streamer.nbytes <= memory
    # As few groups as fit, of equal size.
    room = streamer.room(layers[0])
    assert room == next(n for n in range(1, 13) if -(-12 // n) == -(-12 // most))
    seen: list[tuple[int, int]] = []

    def products(layer: Layer, group: Any) -> None:
        for i, slot in enumerate(group.slots):
            values = {int(v) for w in (group.w13[i], group.w2[i]) for v in w.flatten()}
            assert values == {layer.first + slot}
            seen.append((layer.first, slot))

    for layer, slots in zip(layers, wanted, strict=True):
        for group in streamer.stream(layer, list(slots)):
            assert 1 <= len(group.slots) <= room
            streams.compute(lambda layer=layer, group=group: products(layer, group))
    streams.run()
    assert seen == [(20 * i, slot) for i, slots in enumerate(wanted) for slot in sorted(slots)]


def test_a_loop_that_is_left_early_frees_the_memory() -> None:
    streams = Streams(0)
    layer = Layer(streams, 0, 12, (8,))
    streamer = ExpertStreamer(streams, 2 * (16 + 96), layer, torch.float32)
    for _ in streamer.stream(layer, layer.held):
        break
    groups = [group.slots for group in streamer.stream(layer, [1, 2, 3])]
    streams.run()
    assert groups == [[1, 2], [3]]


def test_too_little_memory() -> None:
    streams = Streams(0)
    layer = Layer(streams, 0, 12, (8_000_000,))
    with pytest.raises(ValueError, match=r"^0.95MB on cpu are too little .* needs 15.26MB$"):
        ExpertStreamer(streams, 1_000_000, layer)
    streamer = ExpertStreamer(streams, 20_000_000, layer)
    larger = Layer(streams, 0, 2, (9_000_000,))
    with pytest.raises(ValueError, match=r"an expert of 8.59MB does not fit .* on cpu"):
        next(streamer.stream(larger, [0]))
