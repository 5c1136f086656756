"""What the stream engine records for traces."""

from __future__ import annotations

import time
from typing import Any

from fake_gpu import TOP_K, Gpu, Side, make_batch, make_layer

LAYERS = 3


def passes(gpu: Gpu, count: int, protected_k: int) -> list[tuple[int, int, int]]:
    """Runs a model of three layers; returns the entries with the times of this process around them.

    The kernels' times are their entry's number, thousandfold, and a little more.
    """
    layers = [make_layer(seed) for seed in range(LAYERS)]
    sides = [Side(), Side()]
    slots = [
        [
            gpu.add(layer, side, i, protected_k if i + 1 < LAYERS else TOP_K, where=f"layer {i}")
            for side in sides
        ]
        for i, layer in enumerate(layers)
    ]
    found = []
    for turn in range(count * LAYERS):
        side = turn % 2
        before = time.monotonic_ns()
        sides[side].times[:2] = 1000 * (gpu.number + 1), 1000 * (gpu.number + 1) + 1
        sides[side].write(make_batch(4, turn))
        number = gpu.ring(slots[turn % LAYERS][side])
        sides[side].wait(number)
        found.append((number, before, time.monotonic_ns()))
        sides[side].times[2:] = [number] + [1000 * number + i for i in (2, 3, 4)]
    gpu.drain()
    return found


def check(row: tuple[int, ...], around: tuple[int, int, int], position: int, defers: bool) -> None:
    slot, number, place, chain, tokens, hand_start, hand_end, seen, rung, begun, ended = row[:11]
    late_begun, late_ended, *back = row[11:]
    assert (number, place, chain, tokens) == (around[0], position, 0, 4)
    assert slot // 2 == position
    assert [hand_start, hand_end, *back] == [1000 * number + i for i in range(5)]
    # A batch may have nothing to defer.
    assert around[1] <= seen <= begun <= ended <= rung <= around[2]
    assert defers or (late_begun, late_ended) == (0, 0)
    assert (late_begun == 0) == (late_ended == 0)
    assert late_begun == 0 or rung <= late_begun <= late_ended


def test_every_entry_is_recorded_once() -> None:
    gpu = Gpu(traces=True)
    around = passes(gpu, 5, TOP_K - 2)
    early = gpu.engine.take_trace()
    assert len(early) == len(around) - 2  # the last one of each side is still open
    gpu.engine.stop()
    rows: list[Any] = early + gpu.engine.take_trace()
    assert gpu.engine.take_trace() == []
    rows.sort(key=lambda row: row[1])
    assert len(rows) == len(around)
    for i, (row, one) in enumerate(zip(rows, around, strict=True)):
        check(row, one, i % LAYERS, i % LAYERS + 1 < LAYERS)
    assert any(row[11] for row in rows)
    assert gpu.engine.stats()["untraced"] == 0


def test_a_result_that_was_never_taken_back_has_no_times() -> None:
    gpu = Gpu(traces=True)
    around = passes(gpu, 1, TOP_K)
    side, layer = Side(), make_layer()
    slot = gpu.add(layer, side, 0, chain=1)
    side.times[2] = 77
    gpu.call(slot, side, make_batch(2, 0))
    gpu.engine.stop()
    rows = sorted(gpu.engine.take_trace(), key=lambda row: row[1])
    assert len(rows) == len(around) + 1
    assert rows[-1][3] == 1 and rows[-1][13:] == [0, 0, 0] and rows[-1][8] > 0


def test_nothing_is_recorded_unless_asked() -> None:
    gpu = Gpu()
    passes(gpu, 2, TOP_K - 1)
    gpu.engine.stop()
    assert gpu.engine.take_trace() == []
