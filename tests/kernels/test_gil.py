"""Python goes on while the compiled core computes, waits for threads, or frees memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kt_kernel import _C

from .core import BF16, INT4_GROUP, INT8_ROW, Layer
from .turns import turns_during

N = 4096
AVX2 = ("_C", "avx2")


def unpack() -> Callable[[], object]:
    layer = Layer(AVX2, BF16, 0, 1, 1, 64, 2 * N, threads=(1,))
    w = np.empty((2 * N, 64), np.float32)
    return lambda: [layer.layer.unpack(0, 0, w) for _ in range(100)]


def pack() -> Callable[[], object]:
    w = np.ones((N, N), np.float32)
    source = (w.ctypes.data, 0, 0, 1.0)
    return lambda: [(w, _C.pack(INT4_GROUP, 32, 0, N, N, source)) for _ in range(4)]


def product() -> Callable[[], object]:
    w, x = np.ones((N, N), np.float32), np.ones((8, N), np.float32)
    return lambda: [_C.product("avx2", False, INT8_ROW, 0, w, x) for _ in range(16)]


def reference_forward() -> Callable[[], object]:
    x, ids, weights = np.ones((16, 256)), np.zeros((16, 1), np.int64), np.ones((16, 1))
    w, down = np.ones((1, N, 256)), np.ones((1, 256, N))
    return lambda: _C.reference_forward(
        x, ids, weights, w, w, down, activation_format=0, skip=[False]
    )


def split_deferred() -> Callable[[], object]:
    ids = np.tile(np.arange(128), (4 * N, 1))
    weights = np.ones(ids.shape, np.float32)
    return lambda: _C.split_deferred(ids, weights, 32, 128)


def make_product_bench() -> Callable[[], object]:
    team, w = _C.Team([1], [-1]), np.ones((8 * N, N), np.float32)
    return lambda: _C.ProductBench(
        team,
        table="avx2",
        gemm=False,
        format=BF16,
        group_size=0,
        scale_type=0,
        n=8 * N,
        k=N,
        w=(w.ctypes.data, 0, 0, 1.0),
        bytes=1,
    )


def set_rows() -> Callable[[], object]:
    w, x = np.ones((32, N), np.float32), np.ones((N, N), np.float32)
    bench = _C.ProductBench(
        _C.Team([1], [-1]),
        table="avx2",
        gemm=False,
        format=INT8_ROW,
        group_size=0,
        scale_type=0,
        n=32,
        k=N,
        w=(w.ctypes.data, 0, 0, 1.0),
        bytes=1,
    )
    return lambda: [bench.set_rows(x) for _ in range(8)]


def end_of_a_team() -> Callable[[], object]:
    """Which finishes what was queued."""
    x, ids = np.ones((4096, 64), np.float32), np.zeros((4096, 1), np.int64)
    weights, y = np.ones((4096, 1), np.float32), np.empty_like(x)
    team = _C.Team([1], [-1])
    layer = _C.MoeLayer(
        team,
        num_experts=1,
        top_k=1,
        hidden_size=64,
        intermediate_size=N,
        forms=[(BF16, 0, 0)] * 3,
        cpu_slots=[True],
        swiglu_limit=0.0,
        swiglu_alpha=0.0,
        max_tokens=256,
        table="avx2",
        kind=0,
    )
    arrays = [array.ctypes.data for array in (ids, weights, y)]
    tickets = [layer.submit(x.ctypes.data, 2, len(x), *arrays) for _ in range(4)]
    kept, used = [team, layer], (x, ids, weights, y, tickets)  # a ticket that goes waits, too
    del team, layer
    return lambda: (kept.clear(), used)


WORKS = [
    unpack,
    pack,
    product,
    reference_forward,
    split_deferred,
    make_product_bench,
    set_rows,
    end_of_a_team,
]


@pytest.mark.parametrize("work", WORKS, ids=[work.__name__ for work in WORKS])
def test_python_goes_on(work: Callable[[], Callable[[], object]]) -> None:
    assert turns_during(work()) > 2
