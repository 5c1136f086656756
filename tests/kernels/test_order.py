"""Columns in another order than that of x (act-order), against float64."""

from __future__ import annotations

import numpy as np
import pytest
from grid import grid

from . import core
from .core import INT4_GROUP, KINDS, VARIANTS, Format, Kind, Layer, Variant
from .oracle import check
from .sources import FP16, INT4_ZERO, MXFP4
from .test_mixed_products import check as check_mixed

FORMATS = [Format(INT4_GROUP, 32, FP16), Format(INT4_ZERO, 64, FP16)]


class OrderedLayer(Layer):
    """Some experts have orders: gate and up the same, different ones, or one of them."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed + 1)
        a, b = (rng.permutation(self.hidden).astype(np.int32) for _ in range(2))
        self.orders = [(a, a), (a, b), (None, b), (None, None)]
        super().__post_init__()

    def load(self, slot: int) -> None:
        orders = self.orders[slot % 4]
        self.layer.load(
            slot,
            *[
                w[slot].address if isinstance(w, list) else (w[slot].ctypes.data, 0, 0, 1.0)
                for w in self.weights
            ],
            *[b[slot].ctypes.data for b in self.bias],
            dtypes=[-1 if isinstance(w, list) else 2 for w in self.weights],
            orders=[0 if order is None else order.ctypes.data for order in orders],
        )


def ordered(variant: Variant, format: Format, *sizes: int, **rest: object) -> OrderedLayer:
    layer = OrderedLayer.of(variant, format, *sizes, **rest)
    assert isinstance(layer, OrderedLayer)
    return layer


def expected_weights(layer: OrderedLayer, matrix: int) -> np.ndarray:
    """W of each expert, from its source and order."""
    result = []
    for slot, source in enumerate(layer.weights[matrix]):
        order = layer.orders[slot % 4][matrix] if matrix < 2 else None
        w = source.values.astype(np.float32)
        if order is not None:
            w[:, order] = w.copy()
        result.append(w)
    return np.stack(result)


@grid(variant=VARIANTS, format=FORMATS, kind=KINDS)
def test_against_the_oracle(variant: Variant, format: Format, kind: Kind) -> None:
    """The oracle multiplies with W as it is; its weights are the layer's, which come first."""
    layer = ordered(
        variant, format, 5, 2, *format.fit(90, 130), kind=kind, threads=(1, 2), biases=True
    )
    for matrix, got in enumerate(layer.unpacked()):
        np.testing.assert_array_equal(got, expected_weights(layer, matrix))
    check(layer, 1, 4, 5, 40, 300)


def test_rows_of_other_types() -> None:
    """bf16 and fp16 rows are brought in order before they are converted."""
    layer = ordered(("_C", "avx2"), FORMATS[0], 4, 2, 96, 64)
    x, ids, weights = layer.batch(6)
    halves = x.astype(np.float16)
    expected = layer.forward(halves.astype(np.float32), ids, weights).astype(np.float16)
    y, ids = np.empty_like(halves), np.ascontiguousarray(ids, np.int64)
    layer.layer.submit(
        halves.ctypes.data, 1, 6, ids.ctypes.data, weights.ctypes.data, y.ctypes.data
    ).wait()
    np.testing.assert_array_equal(y, expected)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    results = []
    for threads in (1, 2, 3, 5):
        layer = ordered(("_C", "avx2"), FORMATS[1], 6, 3, 128, 192, threads=(threads,))
        results.append([layer.forward(*layer.batch(t)) for t in (1, 3, 60)])
    for other in results[1:]:
        for y, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(y, expected)


def test_one_that_goes_on_having_no_order() -> None:
    """Experts loaded before the first one with an order, and after it, keep their own."""
    plain = Layer.of(("_C", "avx2"), FORMATS[0], 4, 2, 96, 64)
    layer = ordered(("_C", "avx2"), FORMATS[0], 4, 2, 96, 64)
    batch = plain.batch(30)
    expected = plain.forward(*batch)
    layer.orders = [(None, None)] * 4
    for slot in range(4):
        layer.load(slot)
    np.testing.assert_array_equal(layer.forward(*batch), expected)


MIXES = [
    (Format(core.BF16), FORMATS[0], FORMATS[1]),
    (FORMATS[1], Format(MXFP4, 0, 0), FORMATS[1]),
]


@grid(variant=VARIANTS, mix=MIXES, kind=KINDS)
def test_rows_of_two_kinds(variant: Variant, mix: tuple[Format, ...], kind: Kind) -> None:
    """gate and up want other activations, and have orders of their own."""
    layer = OrderedLayer(variant, 0, 0, 4, 2, 128, 64, mixed=mix, kind=kind)
    check_mixed(layer, 1, 3, 40)


def test_packed_weights_cannot_tell_an_order() -> None:
    layer = ordered(("_C", "avx2"), FORMATS[0], 4, 2, 96, 64)
    room = np.empty(core._C.packed_shape(*FORMATS[0].form, 64, 96), np.uint8)
    for slot in range(3):
        with pytest.raises(ValueError, match=rf"slot {slot}: its columns are in another order"):
            layer.layer.save_packed(slot, 0, room)
    layer.layer.save_packed(3, 0, room)
