"""Does on the CPU, on the same addresses, what GPU kernels do with a stream engine."""

from __future__ import annotations

import ctypes
import time
from types import ModuleType
from typing import Any

import numpy as np
from kernels.core import FORMATS, SMALL_SWEEP, Layer, module

# The sanitized module is _C_emul, with the emulated tables and classes of its own.
VARIANT = ("_C_emul" if SMALL_SWEEP else "_C", "avx2")
TYPES = {0: np.uint16, 1: np.float16, 2: np.float32}  # of x and out, by number of the dtype
HIDDEN, TOP_K, EXPERTS = 64, 3, 6
DEADLINE = 60.0


def core() -> ModuleType:
    found = module(VARIANT[0])
    assert found is not None
    return found


def make_layer(seed: int = 0, **given: Any) -> Layer:
    sizes = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "inter": 96} | given
    return Layer.of(VARIANT, FORMATS[0], seed=seed, **sizes)


def make_batch(tokens: int, seed: int, dtype: int = 2) -> tuple[Any, Any, Any]:
    """x, ids with some that are no expert's, router weights."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    if dtype == 0:
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    ids = rng.integers(-1, EXPERTS + 1, (tokens, TOP_K)).astype(np.int32)
    return x.astype(TYPES[dtype]), ids, rng.random((tokens, TOP_K)).astype(np.float32)


def at(address: int, dtype: Any, *shape: int) -> Any:
    count = int(np.prod(shape))
    memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


class Side:
    """A StreamSide and views of its contents."""

    def __init__(
        self, capacity: int = 8, dtype: int = 2, partial: bool = True, hidden: int = HIDDEN
    ) -> None:
        self.side = core().StreamSide(capacity, hidden, TOP_K, dtype, partial)
        self.tokens = at(self.side.tokens_address, np.int32, 1)
        self.times = at(self.side.times_address, np.int64, 6)
        self.done = at(self.side.done_address, np.uint32, 1)
        self.x = at(self.side.x_address, TYPES[dtype], capacity, hidden)
        self.ids = at(self.side.ids_address, np.int32, capacity, TOP_K)
        self.weights = at(self.side.weights_address, np.float32, capacity, TOP_K)
        self.out = at(self.side.out_address, TYPES[dtype], capacity, hidden)

    def write(self, batch: tuple[Any, Any, Any]) -> None:
        n = len(batch[0])
        self.tokens[0] = n
        self.x[:n], self.ids[:n], self.weights[:n] = batch
        self.out[:] = 7

    def wait(self, number: int) -> Any:
        """Waits like the kernel after the layer."""
        end = time.monotonic() + DEADLINE
        while self.done[0] != number:
            assert time.monotonic() < end, f"done is {self.done[0]}, not {number}"
            time.sleep(0)
        return self.out[: max(self.tokens[0], 0)].copy()


class Gpu:
    """One engine and the code that rings it."""

    def __init__(
        self, entries: int = 64, watchdog: float = 30.0, first: int = 0, traces: bool = False
    ) -> None:
        self.engine = core().StreamEngine(entries, watchdog, first, traces)
        self.entries = entries
        self.words = at(self.engine.ring_address, np.uint64, entries)
        self.head = at(self.engine.head_address, np.uint32, 1)
        self.number = first

    def add(
        self, layer: Layer, side: Side, position: int = 0, protected_k: int = TOP_K, **rest: Any
    ) -> int:
        given = {"where": f"layer {position}", "chain": 0} | rest
        return self.engine.add_slot(
            layer.layer, side=side.side, position=position, protected_k=protected_k, **given
        )

    def ring(self, slot: int) -> int:
        self.number = (self.number + 1) % 2**32
        end = time.monotonic() + DEADLINE
        while (self.number - int(self.head[0])) % 2**32 > self.entries:
            assert time.monotonic() < end, "head does not advance"
            time.sleep(0)
        self.words[self.number & (self.entries - 1)] = (slot << 32) | self.number
        return self.number

    def call(self, slot: int, side: Side, batch: tuple[Any, Any, Any]) -> Any:
        side.write(batch)
        return side.wait(self.ring(slot))

    def drain(self) -> None:
        assert self.engine.drain(DEADLINE)


def by_hand(
    layer: Layer,
    batch: tuple[Any, Any, Any],
    ids: Any = None,
    dtype: int = 2,
    add: Any = None,
    partial: bool = False,
) -> Any:
    """The same result by MoeLayer.submit: out, or the unrounded sums."""
    x, given, weights = (np.ascontiguousarray(a) for a in batch)
    ids = np.ascontiguousarray(given if ids is None else ids, np.int64)
    y = np.empty(x.shape, np.float32 if partial else TYPES[dtype])
    layer.layer.submit(
        x.ctypes.data,
        dtype,
        len(x),
        ids.ctypes.data,
        weights.ctypes.data,
        0 if partial else y.ctypes.data,
        0 if add is None else add.ctypes.data,
        y.ctypes.data if partial else 0,
    ).wait()
    return y
