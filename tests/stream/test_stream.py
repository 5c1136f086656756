"""The stream engine with a CPU in the place of the GPU: results, order, and the ring."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import EXPERTS, HIDDEN, TOP_K, Gpu, Side, by_hand, core, make_batch, make_layer
from grid import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.core import SMALL_SWEEP, row_errors

from kt_kernel.moe.routing import select_deferred_experts

TURNS = 300 if SMALL_SWEEP else 3000


def split(batch: tuple[Any, Any, Any], protected_k: int) -> tuple[Any, Any]:
    _, ids, weights = (torch.from_numpy(a) if a.dtype != np.uint16 else None for a in batch)
    now, later = select_deferred_experts(ids, weights, protected_k)
    return now.numpy(), later.numpy()


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_a_pass_is_that_of_the_layer(dtype: int, tokens: int) -> None:
    gpu, layer = Gpu(), make_layer()
    side = Side(dtype=dtype, partial=False)
    slot = gpu.add(layer, side)
    for seed in range(3):
        batch = make_batch(tokens, seed, dtype)
        out = gpu.call(slot, side, batch)
        assert np.array_equal(out, by_hand(layer, batch, dtype=dtype))
        assert (side.out[tokens:] == 7).all()
        if dtype == 2:
            x, ids, weights = batch
            assert row_errors(out, layer.reference(x, ids, weights)).max() < 2e-2
    gpu.drain()
    gpu.engine.raise_error()
    assert gpu.engine.pending() == 0
    stats = gpu.engine.stats()
    assert (stats["entries"], stats["immediate_jobs"], stats["errors"]) == (3, 3, 0)


@pytest.mark.parametrize("protected_k", [1, TOP_K])
def test_a_batch_without_work_takes_no_threads(protected_k: int) -> None:
    layer = make_layer(cpu_slots=[True] * 3 + [False] * 3)
    gpu, sides = Gpu(), [Side(), Side()]
    slots = [gpu.add(layer, side, i, protected_k) for i, side in enumerate(sides)]
    x, ids, weights = make_batch(5, 1)
    for nobody in (-1, 3, 5, EXPERTS, 2**31 - 1, -(2**31)):
        ids[:] = nobody
        assert not gpu.call(slots[0], sides[0], (x, ids, weights)).any()
    gpu.drain()
    stats = gpu.engine.stats()
    assert (stats["empty"], stats["immediate_jobs"], stats["deferred_jobs"]) == (6, 0, 0)
    ids[:], ids[2, 1] = -1, 2
    weights[2, 1] = 0.0  # the least: deferred, unless all are immediate
    weights[2, 0] = weights[2, 2] = 1.0
    gpu.call(slots[0], sides[0], (x, ids, weights))
    gpu.call(slots[1], sides[1], (x, ids, weights))
    gpu.drain()
    stats = gpu.engine.stats()
    assert (stats["deferred_jobs"] == 0) == (protected_k == TOP_K)
    assert stats["immediate_jobs"] == (2 if protected_k == TOP_K else 1)


def test_slots_change_between_batches() -> None:
    few, gpu, sides = [True] * 3 + [False] * 3, Gpu(), [Side(), Side()]
    layer, fresh = make_layer(), make_layer(cpu_slots=few)
    slots = [gpu.add(made, side) for made, side in zip((layer, fresh), sides, strict=True)]
    batch, others = make_batch(5, 1), make_batch(5, 1)
    others[1][:] = 4
    whole = gpu.call(slots[0], sides[0], batch)
    for _ in range(3):
        gpu.drain()
        layer.layer.set_cpu_slots(few)
        part = gpu.call(slots[0], sides[0], batch)
        assert np.array_equal(part, gpu.call(slots[1], sides[1], batch))
        assert not np.array_equal(part, whole)
        assert not gpu.call(slots[0], sides[0], others).any()
        gpu.drain()
        layer.layer.set_cpu_slots([True] * EXPERTS)
        assert np.array_equal(gpu.call(slots[0], sides[0], batch), whole)
        assert gpu.call(slots[0], sides[0], others).any()
    assert gpu.engine.stats()["empty"] == 3


def one_pass(gpu: Gpu, slots: list[int], sides: list[Side], batches: list[Any]) -> list[Any]:
    outs = []
    for i, (slot, batch) in enumerate(zip(slots, batches, strict=True)):
        outs.append(gpu.call(slot, sides[i % len(sides)], batch))
    return outs


def pass_by_hand(layers: list[Any], batches: list[Any], protected_k: int, dtype: int) -> list[Any]:
    outs, carried = [], None
    for i, (layer, batch) in enumerate(zip(layers, batches, strict=True)):
        now, later = split(batch, protected_k) if i < len(layers) - 1 else (batch[1], None)
        outs.append(by_hand(layer, batch, now, dtype, add=carried))
        carried = None
        if later is not None and ((later >= 0) & (later < EXPERTS)).any():
            carried = by_hand(layer, batch, later, dtype, partial=True)
    return outs


@pytest.mark.parametrize("protected_k", [-1, 0, 1, 2])
@pytest.mark.parametrize("sides", [2, 3])
@pytest.mark.parametrize("teams", [1, 2])
def test_deferral(protected_k: int, sides: int, teams: int) -> None:
    layers = [make_layer(seed=i, threads=((2,), (1, 1))[i % teams]) for i in range(4)]
    dtype = 1
    gpu, buffers = Gpu(), [Side(dtype=dtype) for _ in range(sides)]
    slots = [
        gpu.add(layer, buffers[i % sides], i, protected_k if i < 3 else TOP_K)
        for i, layer in enumerate(layers)
    ]
    for turn in range(4):
        batches = [make_batch(1 + 2 * turn, 10 * turn + i, dtype) for i in range(4)]
        expected = pass_by_hand(layers, batches, protected_k, dtype)
        for i, out in enumerate(one_pass(gpu, slots, buffers, batches)):
            assert np.array_equal(out, expected[i]), (turn, i)
    gpu.engine.raise_error()
    assert gpu.engine.stats()["carried"] > 0


def test_nothing_is_carried_over_a_gap() -> None:
    """Neither into a first layer, nor past a skipped one, nor to a batch of another size."""
    layers, sides = [make_layer(seed=i) for i in range(3)], [Side(), Side()]
    gpu, batch = Gpu(), make_batch(4, 0)
    slots = [gpu.add(layer, sides[i % 2], i, 0) for i, layer in enumerate(layers)]
    zeros = np.zeros((4, HIDDEN), np.float32)
    for second, other in ((0, batch), (2, batch), (1, make_batch(3, 0))):
        gpu.call(slots[0], sides[0], batch)
        out = gpu.call(slots[second], sides[second % 2], other)
        assert np.array_equal(out, zeros[: len(out)])
    gpu.call(slots[0], sides[0], batch)
    carried = by_hand(layers[0], batch, partial=True)
    out = gpu.call(slots[1], sides[1], batch)  # all of its own are deferred: what came is left
    assert np.array_equal(out, carried) and carried.any()
    gpu.drain()
    assert gpu.engine.stats()["carried"] == 1


def test_nothing_is_deferred_that_the_cpu_does_not_hold() -> None:
    layer, side, gpu = make_layer(cpu_slots=[True] * 3 + [False] * 3), Side(), Gpu()
    slot = gpu.add(layer, side, 0, 1)
    x, ids, weights = make_batch(2, 0)
    ids[:] = [[0, 4, 5], [1, 3, 4]]
    weights[:] = [[0.9, 0.1, 0.2]] * 2
    out = gpu.call(slot, side, (x, ids, weights))
    assert np.array_equal(out, by_hand(layer, (x, ids, weights)))
    gpu.drain()
    assert gpu.engine.stats()["deferred_jobs"] == 0


@pytest.mark.parametrize("first", [0, 2**32 - TURNS // 2])
def test_ring_and_numbers_wrap(first: int) -> None:
    gpu, layer = Gpu(entries=8, first=first), make_layer()
    sides = [Side(2, partial=False), Side(2, partial=False)]
    slots = [gpu.add(layer, side, i) for i, side in enumerate(sides)]
    batches = [make_batch(1 + i % 2, i) for i in range(7)]
    expected = [by_hand(layer, batch) for batch in batches]
    for turn in range(TURNS):
        i = turn % len(batches)
        assert np.array_equal(gpu.call(slots[turn % 2], sides[turn % 2], batches[i]), expected[i])
    assert gpu.engine.stats()["entries"] == TURNS
    gpu.drain()
    assert gpu.head[0] == gpu.number == (first + TURNS) % 2**32
    gpu.engine.raise_error()


def test_interleaved_chains() -> None:
    """Each of two models has its own carry."""
    layers = [make_layer(seed=i) for i in range(2)]
    gpu, batches = Gpu(), [make_batch(3, i) for i in range(2)]
    sides = [[Side(), Side()] for _ in range(2)]
    slots = [
        [gpu.add(layers[i], sides[c][i], i, (1, TOP_K)[i], chain=c) for i in range(2)]
        for c in range(2)
    ]
    for _ in range(20):
        outs = [gpu.call(slots[c][i], sides[c][i], batches[i ^ c]) for i in (0, 1) for c in (0, 1)]
        for c in range(2):
            expected = pass_by_hand(layers, [batches[c], batches[1 - c]], 1, 2)
            assert np.array_equal(outs[c], expected[0])
            assert np.array_equal(outs[2 + c], expected[1])


def test_two_engines_at_once() -> None:
    """From a thread each, on one team."""
    wrong = []

    def serve(seed: int) -> None:
        gpu, layer, side = Gpu(entries=8), make_layer(seed), Side(partial=False)
        slot, batch = gpu.add(layer, side), make_batch(4, seed)
        expected = by_hand(layer, batch)
        for _ in range(TURNS // 10):
            if not np.array_equal(gpu.call(slot, side, batch), expected):
                wrong.append(seed)
        gpu.engine.raise_error()

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_side_rung_again_before_it_is_done() -> None:
    """As after an aborted pass: the last one counts, whatever the others read."""
    layer, gpu = make_layer(max_tokens=8), Gpu(entries=8)
    side = Side(512)
    slot, batches = gpu.add(layer, side, 0, 1), [make_batch(512, i) for i in range(2)]
    now, _ = split(batches[1], 1)
    expected = by_hand(layer, batches[1], now)
    for _ in range(2 if SMALL_SWEEP else 10):
        for _ in range(5):
            side.write(batches[0])
            gpu.ring(slot)
        gpu.drain()
        assert np.array_equal(gpu.call(slot, side, batches[1]), expected)
        for _ in range(20):  # ids torn between the two
            side.write(batches[gpu.number % 2])
            gpu.ring(slot)
    gpu.drain()
    gpu.engine.raise_error()


def test_sleeping_and_waking() -> None:
    gpu, layer, side = Gpu(), make_layer(), Side()
    slot, batch = gpu.add(layer, side), make_batch(1, 0)
    gpu.call(slot, side, batch)
    time.sleep(0.1)
    asleep = gpu.engine.stats()["sleeps"]
    assert asleep > 20
    time.sleep(1.2)
    before, started = gpu.engine.stats()["sleeps"], time.perf_counter()
    time.sleep(0.2)
    sleeps = gpu.engine.stats()["sleeps"] - before
    # A busy machine may return late from either sleep.
    halves = (time.perf_counter() - started) / 0.0005
    assert 0 < sleeps <= halves + 20, "sleeps of half a millisecond by now"
    gpu.engine.wake()
    gpu.call(slot, side, batch)


@settings(deadline=None, max_examples=examples(100 if SMALL_SWEEP else 400))
@given(data=st.data())
def test_split_is_that_of_python(data: st.DataObject) -> None:
    tokens, k = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 9))
    experts = data.draw(st.integers(1, 12))
    ids = data.draw(
        st.lists(st.integers(-3, experts + 2), min_size=tokens * k, max_size=tokens * k)
    )
    value = st.sampled_from([0.0, -0.0, 0.25, 0.5, -1.0, float("nan"), float("inf"), 1e-45])
    weights = data.draw(st.lists(value, min_size=tokens * k, max_size=tokens * k))
    protected_k = data.draw(st.integers(-1, k + 1))
    i = np.array(ids, np.int64).reshape(tokens, k)
    w = np.array(weights, np.float32).reshape(tokens, k)
    got = core().split_deferred(i, w, protected_k, experts)
    wanted = select_deferred_experts(torch.from_numpy(i), torch.from_numpy(w), protected_k)
    for mine, theirs in zip(got, wanted, strict=True):
        expert = (theirs.numpy() >= 0) & (theirs.numpy() < experts)
        assert np.array_equal(mine, np.where(expert, theirs.numpy(), -1))


def test_an_engine_without_slots_ends() -> None:
    gpu = Gpu()
    assert gpu.engine.drain(0) and gpu.engine.pending() == 0
    gpu.engine.stop()
    del gpu
    gc.collect()
