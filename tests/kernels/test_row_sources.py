"""Integers with a scale per row that come quantised: kInt8Row and kInt4Row from other tools."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from grid import examples, grid
from hypothesis import given, settings
from hypothesis import strategies as st

from . import core
from .core import INT4_ROW, INT8_ROW, TILE, VARIANTS, VECTOR, Format, Kind, Layer, Variant, formats

Bytes = npt.NDArray[np.uint8]
LOWEST = {INT8_ROW: -128, INT4_ROW: -8}
FORMATS = [Format(INT8_ROW), Format(INT4_ROW)]


class RowSource:
    """Codes q [N, K] and scales [N], W = q * scale."""

    def __init__(self, format: int, q: npt.NDArray[np.int64], scale: npt.NDArray[np.float32]):
        self.q, self.scale = q, np.ascontiguousarray(scale, np.float32)
        u = (q + 8).astype(np.uint8)
        packed = u[:, 0::2] | u[:, 1::2] << 4 if format == INT4_ROW else q.astype(np.int8)
        self.data = np.ascontiguousarray(packed)

    @property
    def address(self) -> tuple[int, int, int, float]:
        return self.data.ctypes.data, self.scale.ctypes.data, 0, 1.0


def random_source(format: int, n: int, k: int, seed: int = 0, lowest: bool = True) -> RowSource:
    rng = np.random.default_rng([seed, format, n, k])
    high = -LOWEST[format] - 1
    q = rng.integers(LOWEST[format] if lowest else -high, high + 1, (n, k))
    q[:, 0] = high  # the row's largest: quantising W again gives q and scale
    return RowSource(format, q, 2.0 ** rng.integers(-9, -4, n))


def pack(format: int, n: int, k: int, address: tuple[int, int, int, float]) -> Bytes:
    return core._C.pack(format, 0, 0, n, k, address)


@settings(max_examples=examples(60), deadline=None)
@given(
    format=st.sampled_from([INT8_ROW, INT4_ROW]),
    n=st.integers(1, 70),
    k=st.integers(1, 150),
    seed=st.integers(0, 99),
)
def test_packed_like_the_weights_they_stand_for(format: int, n: int, k: int, seed: int) -> None:
    """Dense weights that quantise to these codes and scales exactly."""
    k *= 2
    source = random_source(format, n, k, seed, lowest=False)
    dense = (source.q * source.scale[:, None]).astype(np.float32)
    expected = pack(format, n, k, (dense.ctypes.data, 0, 0, 1.0))
    np.testing.assert_array_equal(pack(format, n, k, source.address), expected)


@grid(variant=VARIANTS, format=FORMATS, kind=[VECTOR, TILE], goals=[core.kernel])
def test_every_code_is_exact(variant: Variant, format: Format, kind: Kind) -> None:
    """-128 and -8 too, which no quantiser of ours writes; sums that nearly fill 32 bits."""
    module = core.core_with(*variant)
    rng = np.random.default_rng(0)
    for n, k in ((40, 64), (33, 46), (32, 4096), (32, 65536)):
        least = LOWEST[format.code]
        lowest = np.full((n, k), least)
        ends = rng.choice([least, -least - 1], (n, k))
        x = rng.choice(np.array([-1, 1], np.float32), (5, k))
        x[1:3] = [[-1], [1]]
        for q in (lowest, ends):
            source = RowSource(format.code, q, np.ones(n))
            y = module.product_quantised(
                variant.table, kind == TILE, *format.form, n, source.address, x
            )
            exact = (x * 127).astype(np.int64) @ q.T
            expected = exact.astype(np.float32) * (np.float32(1) / np.float32(127))
            np.testing.assert_array_equal(y[:, :n], expected)


@grid(variant=VARIANTS, format=FORMATS, kind=[VECTOR, TILE], goals=[core.kernel])
def test_negative_scales(variant: Variant, format: Format, kind: Kind) -> None:
    """The products with -scale are those with scale, with the other sign, bit by bit."""
    module = core.core_with(*variant)
    source = random_source(format.code, 40, 96)
    x = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    results = []
    for sign in (1, -1):
        scale = source.scale * np.where(np.arange(40) % 3, 1, sign).astype(np.float32)
        signed = RowSource(format.code, source.q, scale)
        y = module.product_quantised(
            variant.table, kind == TILE, *format.form, 40, signed.address, x
        )
        results.append(y[:, :40])
    results[1][:, ::3] *= -1
    np.testing.assert_array_equal(*results)


@formats(FORMATS)
@pytest.mark.parametrize("threads", [(2,), (1, 2), (1, 1, 1)], ids=str)
def test_in_a_layer_beside_dense_weights(format: Format, threads: tuple[int, ...]) -> None:
    """The same bits whether a matrix comes quantised or dense, on any number of pools."""
    table = VARIANTS[0][1] if VARIANTS[0][0] == "_C" else "avx2"
    layer = Layer.of(("_C", table), format, 2, 2, 96, 160, threads=threads)
    made = [[random_source(format.code, *s, lowest=False) for _ in range(2)] for s in layer.shapes]
    dense = [
        np.stack([(s.q * s.scale[:, None]).astype(np.float32) for s in every]) for every in made
    ]
    batch = layer.batch(9)
    results = []
    for quantised in ((), (0, 1, 2), (1,), (0, 2)):
        layer.weights = [made[m] if m in quantised else dense[m] for m in range(3)]
        for slot in range(2):
            layer.load(slot)
        for got, expected in zip(layer.unpacked(), dense, strict=True):
            np.testing.assert_array_equal(got, expected)
        results.append(layer.forward(*batch))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@formats(FORMATS)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_cannot_be(format: Format, scale: float) -> None:
    source = random_source(format.code, 64, 64)
    source.scale[37] = scale
    with pytest.raises(ValueError, match="row 37: a scale is NaN or infinite; accepted: a finite"):
        pack(format.code, 64, 64, source.address)
