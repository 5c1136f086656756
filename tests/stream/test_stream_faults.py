"""The stream engine where things go wrong: nothing hangs, and the next call says what it was."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import (
    DEADLINE,
    HIDDEN,
    TOP_K,
    VARIANT,
    Gpu,
    Side,
    by_hand,
    core,
    make_batch,
    make_layer,
)
from kernels.core import SMALL_SWEEP, Format, Layer

ROOT = Path(__file__).resolve().parents[2]


def raised(gpu: Gpu) -> str:
    gpu.drain()
    with pytest.raises(RuntimeError) as caught:
        gpu.engine.raise_error()
    gpu.engine.raise_error()  # said once
    return str(caught.value)


@pytest.mark.parametrize("tokens", [0, -1, 9, 2**31 - 1, -(2**31)])
def test_bad_tokens(tokens: int) -> None:
    gpu, layer, side = Gpu(), make_layer(), Side(8)
    slot, batch = gpu.add(layer, side), make_batch(2, 0)
    side.write(batch)
    side.tokens[0] = tokens
    number = gpu.ring(slot)
    gpu.drain()
    assert side.done[0] == number
    assert (side.out == 7).all()
    assert raised(gpu) == f"layer 0: a batch of {tokens} tokens was submitted; accepted: 1 to 8"
    assert np.array_equal(gpu.call(slot, side, batch), by_hand(layer, batch))


@pytest.mark.parametrize("slot", [1, 2**31, 2**32 - 1])
def test_bad_slot(slot: int) -> None:
    gpu, layer, side = Gpu(entries=8), make_layer(), Side()
    good, batch = gpu.add(layer, side), make_batch(2, 0)
    for _ in range(20):
        gpu.ring(slot)
    assert np.array_equal(gpu.call(good, side, batch), by_hand(layer, batch))
    assert raised(gpu) == f"entry 1 of the stream names slot {slot}, which does not exist"
    assert gpu.engine.stats()["errors"] == 20


def test_a_dropped_slot() -> None:
    gpu, layer, side = Gpu(), make_layer(), Side()
    slot, batch = gpu.add(layer, side), make_batch(3, 0)
    gpu.call(slot, side, batch)
    gpu.engine.drop_slot(slot)
    gpu.engine.drop_slot(slot)
    out = gpu.call(slot, side, batch)
    assert not out.any() and (side.out[3:] == 7).all()
    assert raised(gpu) == "layer 0: was freed, but a CUDA graph still calls it"
    again = gpu.add(layer, side)
    assert again == slot + 1
    assert np.array_equal(gpu.call(again, side, batch), by_hand(layer, batch))
    for bad in (-1, 2):
        with pytest.raises(ValueError, match="of 2"):
            gpu.engine.drop_slot(bad)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(SMALL_SWEEP, reason="the sanitizer keeps freed memory")
def test_a_dropped_slot_frees_its_weights() -> None:
    gpu, side = Gpu(), Side(hidden=1024)
    layer = Layer.of(VARIANT, Format(0), 8, TOP_K, 1024, 1024)  # 50 MB
    slot = gpu.add(layer, side)
    side.tokens[0] = 1
    side.wait(gpu.ring(slot))
    layer.weights = []
    gc.collect()
    before = resident()
    gpu.engine.drop_slot(slot)
    del layer
    gc.collect()
    end = time.monotonic() + DEADLINE
    while resident() > before - 40e6:
        assert time.monotonic() < end
        time.sleep(0.01)


def busy(layer: Layer, milliseconds: int) -> list[Any]:
    """Passes queued on the layer's team that take at least so long, and what they work on."""
    tokens = 256
    x = np.ones((tokens, layer.hidden), np.float32)
    ids = np.tile(np.arange(layer.top_k), (tokens, 1)).astype(np.int64)
    weights, y = np.ones(ids.shape, np.float32), np.empty_like(x)
    pointers = [a.ctypes.data for a in (ids, weights, y)]
    once = 1.0
    for _ in range(3):
        start = time.monotonic()
        layer.layer.submit(x.ctypes.data, 2, tokens, *pointers).wait()
        once = min(once, time.monotonic() - start)
    tickets = [
        layer.layer.submit(x.ctypes.data, 2, tokens, *pointers)
        for _ in range(1 + int(milliseconds * 1e-3 / once))
    ]
    return [tickets, x, ids, weights, y]


def test_watchdog(capfd: pytest.CaptureFixture[str]) -> None:
    # Its time is far above that of a batch on a busy machine, and far below that of the work.
    layer, big = make_layer(), make_layer(hidden=256, inter=512)
    gpu, side, batch = Gpu(watchdog=0.5), Side(), make_batch(2, 0)
    slot = gpu.add(layer, side, where="layer 3")
    gpu.call(slot, side, batch)
    work = busy(big, 3000)
    start = time.monotonic()
    gpu.call(slot, side, batch)
    assert time.monotonic() - start > 0.4
    assert not work[0][-1].done and not gpu.engine.drain(0.01)
    with pytest.raises(RuntimeError, match=r"^layer 3: no result for [\d.]+ s: the layer's jo"):
        gpu.engine.raise_error()
    # Its buffers are still in use, so the next one cannot even start.
    first = gpu.number
    gpu.call(slot, side, batch)
    with pytest.raises(RuntimeError, match=r"^layer 3: not started for [\d.]+ s"):
        gpu.engine.raise_error()
    gpu.drain()
    assert work[0][-1].done
    assert side.done[0] == gpu.number == first + 1, "what came late rang an old number"
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("kt: layer 3: no") for line in said)
    stats = gpu.engine.stats()
    assert (stats["watchdog"], stats["running"]) == (2, 0)
    assert np.array_equal(gpu.call(slot, side, batch), by_hand(layer, batch))
    gpu.engine.raise_error()


def test_stop_with_work_pending() -> None:
    layer, gpu = make_layer(), Gpu()
    sides = [Side(partial=False) for _ in range(20)]
    slots = [gpu.add(layer, side, i) for i, side in enumerate(sides)]
    batch = make_batch(4, 0)
    work = busy(layer, 100)
    for slot, side in zip(slots, sides, strict=True):
        side.write(batch)
        gpu.ring(slot)
    gpu.engine.stop()
    expected = by_hand(layer, batch)
    for number, side in enumerate(sides, 1):
        assert side.done[0] == number and np.array_equal(side.out[:4], expected)
    assert gpu.engine.pending() == 0 and work[0][-1].done
    gpu.engine.stop()
    with pytest.raises(RuntimeError, match="the stream engine was stopped"):
        gpu.add(layer, sides[0])


def test_an_engine_goes_while_its_job_is_stuck(capfd: pytest.CaptureFixture[str]) -> None:
    """The job finishes later, in memory that it owns."""
    layer, big = make_layer(), make_layer(hidden=256, inter=512)
    gpu, side, batch = Gpu(watchdog=0.02), Side(), make_batch(2, 0)
    slot = gpu.add(layer, side, 0, 1)
    work = busy(big, 3000)
    side.write(batch)
    gpu.ring(slot)
    kept = weakref.ref(gpu.engine)
    del gpu, side
    assert kept() is None and not work[0][-1].done
    work[0][-1].wait()
    assert "no result" in capfd.readouterr().err
    assert by_hand(layer, batch).any()


def test_drain_takes_its_time() -> None:
    layer, gpu, side = make_layer(), Gpu(), Side()
    slot, batch = gpu.add(layer, side, 0, 0), make_batch(3, 0)
    work = busy(layer, 100)
    side.write(batch)
    gpu.ring(slot)
    assert not gpu.engine.drain(0.005)
    assert not work[0][-1].done
    gpu.drain()
    assert work[0][-1].done


def refused(match: str, **change: Any) -> None:
    gpu, layer = Gpu(), change.pop("layer", None) or make_layer()
    side = change.pop("side", None) or Side(partial=False)
    with pytest.raises(ValueError, match=match):
        gpu.add(layer, side, **change)
    assert gpu.engine.stats()["entries"] == 0


def test_slots_that_do_not_fit() -> None:
    refused("^layer 0: the layer's hidden size is 64, the side's 96$", side=Side(hidden=96))
    refused("^layer 0: the layer's top_k is 2, the side's 3$", layer=make_layer(top_k=2))
    refused("needs a side with a partial", protected_k=2)
    refused("chain -1", chain=-1)
    refused("position -1", position=-1)
    other, side = Gpu(), Side()
    other.add(make_layer(), side)
    refused("belongs to another engine", side=side)


def test_two_layers_in_turn_need_two_sides_to_defer() -> None:
    gpu, side = Gpu(), Side()
    first, second = (gpu.add(make_layer(seed=i), side, i, 1 - i or TOP_K) for i in range(2))
    assert not gpu.call(first, side, make_batch(4, 1)).all()
    assert not gpu.call(second, side, make_batch(4, 2)).any()
    with pytest.raises(RuntimeError, match="^layer 1: this batch uses the buffers of the"):
        gpu.engine.raise_error()


def test_a_layer_that_is_not_loaded() -> None:
    layer, gpu = make_layer(), Gpu()
    empty = core().MoeLayer(
        core().Team([1], [-1]),
        num_experts=2,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=32,
        forms=[(layer.format, layer.group, 0)] * 3,
        cpu_slots=[False, True],
        swiglu_limit=0.0,
        swiglu_alpha=0.0,
        max_tokens=8,
        table=VARIANT[1],
        kind=0,
    )
    with pytest.raises(ValueError, match="^layer 5: expert slot 1 is not loaded$"):
        gpu.engine.add_slot(empty, "layer 5", Side().side, 0, 0, TOP_K)


@pytest.mark.skipif(SMALL_SWEEP, reason="the sanitizer keeps freed memory")
def test_the_memory_of_a_side_goes_once_nothing_rings_it() -> None:
    layer, gpu = make_layer(), Gpu()
    gpu.call(gpu.add(layer, first := Side()), first, make_batch(2, 0))
    before = resident()
    for _ in range(4):
        side = core().StreamSide(2**16, HIDDEN, TOP_K, 2, False)
        slot = gpu.engine.add_slot(layer.layer, "layer 1", side, 0, 1, TOP_K)
        ctypes.memset(side.buffer.address, 1, side.buffer.nbytes)
        assert resident() - before > 30 << 20 and gpu.engine.entries_of(slot) == 0
        del side
        gpu.engine.drop_slot(slot, forget=True)
        assert resident() - before < 8 << 20
    number = gpu.ring(slot)  # not that anybody should
    gpu.drain()
    assert gpu.head[0] == number
    with pytest.raises(RuntimeError, match=f"names slot {slot}, which does not exist"):
        gpu.engine.raise_error()
    with pytest.raises(ValueError, match="slot 99 of 5"):
        gpu.engine.entries_of(99)


@pytest.mark.parametrize("entries", [0, 1, 3, -8, 2**21])
def test_entries(entries: int) -> None:
    with pytest.raises(ValueError, match=f"^entries {entries}; accepted: a power of two from 2"):
        core().StreamEngine(entries, 1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_watchdog_seconds(seconds: float) -> None:
    with pytest.raises(ValueError, match="watchdog_seconds"):
        core().StreamEngine(8, seconds)


@pytest.mark.parametrize(
    "given", [(0, 64, 2, 2), (8, 0, 2, 2), (8, 64, 0, 2), (8, 64, 2, 3), (2**31, 64, 2, 2)]
)
def test_sides_that_make_no_sense(given: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        core().StreamSide(*given)


def test_a_side_that_no_memory_holds() -> None:
    with pytest.raises(MemoryError):
        core().StreamSide(2**31 - 1, 65536, 65536, 2, True)


def test_host_buffers() -> None:
    buffer = core().HostBuffer(10_001)
    assert buffer.nbytes == 10_001 and buffer.address % 4096 == 0
    side = Side(5)
    parts = [
        getattr(side.side, f"{name}_address") - side.side.buffer.address
        for name in ("tokens", "done", "x", "ids", "weights", "out")
    ]
    assert parts[0] == 0 and parts == sorted(parts) and not any(p % 64 for p in parts)
    assert parts[1] >= 64 and parts[2] >= parts[1] + 64
    end = parts[-1] + 5 * HIDDEN * 4
    assert side.side.buffer.nbytes >= end + 5 * HIDDEN * 4, "partial"
    assert side.side.capacity == 5
    with pytest.raises(ValueError, match="0 bytes"):
        core().HostBuffer(0)


FORK = """
import gc, os, sys
sys.path[:0] = sys.argv[1:]
from fake_gpu import *
from kernels.forks import join_child
import numpy as np

gpu, layer, side = Gpu(), make_layer(), Side()
slot, batch = gpu.add(layer, side), make_batch(4, 0)
expected = by_hand(layer, batch)
for turn in range(20):
    side.write(batch)
    number = gpu.ring(slot)
    child = os.fork()
    if child == 0:
        code = 0
        for use in (
            gpu.engine.pending, gpu.engine.raise_error, gpu.engine.stop, gpu.engine.wake,
            gpu.engine.stats, lambda: gpu.engine.drain(1.0), lambda: gpu.engine.drop_slot(0),
            lambda: gpu.add(layer, side),
        ):
            try:
                use()
                code = 3
            except RuntimeError as error:
                code = code or (0 if "belongs to the parent process" in str(error) else 4)
        del gpu, use
        gc.collect()
        mine = Side()
        ours = Gpu()
        same = np.array_equal(ours.call(ours.add(layer, mine), mine, batch), expected)
        del side
        gc.collect()
        os._exit(code or (0 if same else 5))
    join_child(child, turn, 60)
    assert np.array_equal(side.wait(number), expected)
gpu.engine.raise_error()
print("fine")
"""


def python(program: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(here), str(here.parent)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# A child inherits the lock on the sanitizer's heap if another thread held it at the fork (GCC 12).
@pytest.mark.skipif(SMALL_SWEEP, reason="a forked child may hang in the sanitizer's allocator")
def test_fork() -> None:
    assert "fine" in python(FORK)


EXIT = """
import sys
sys.path[:0] = sys.argv[1:]
from fake_gpu import *

gpu, layer, side = Gpu(), make_layer(), Side()
slot, batch = gpu.add(layer, side), make_batch(4, 0)
gpu.call(slot, side, batch)
keep = gpu.engine, layer, side
gpu.ring(slot)
print("fine")
"""


def test_a_process_ends_with_its_engine_alive() -> None:
    assert "fine" in python(EXIT)
