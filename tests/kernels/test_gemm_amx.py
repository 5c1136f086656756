"""AMX products of every weight format against float64, with real and emulated tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from grid import grid

from . import core, sources
from .core import ALL_BLOCKS, QUANTISED, Format, Variant
from .sources import BF16, FP8_BLOCK, FP8_ROW, FP32, INT4_ROW, INT8_ROW, NVFP4, Doubles

TABLES = [variant for variant in core.VARIANTS if variant.table == "amx"]
FORMATS = [*QUANTISED, *ALL_BLOCKS]
SMALLEST = 2.0**-126  # below it bf16 is subnormal, which the tile unit takes for zero
LARGEST = (2 - 2.0**-8) * 2.0**127  # from here on bf16 is infinite


def product(variant: Variant, source: Any, x: npt.NDArray[Any]) -> core.Floats:
    n, k = source.shape
    assert x.shape[1] == k
    y = core.core_with(*variant).product_quantised(
        "amx",
        True,
        source.format,
        source.group,
        source.scale_type,
        n,
        source.address,
        np.ascontiguousarray(x, np.float32),
    )
    assert not np.any(y[:, n:]), "rows past the matrix must be zeros"
    return y[:, :n]


def round_bf16(w: Doubles) -> Doubles:
    """To nearest, ties to even; subnormals to zero."""
    mantissa, exponent = np.frexp(w)
    rounded = np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    rounded[np.abs(rounded) < SMALLEST] = 0
    rounded[np.abs(w) >= LARGEST] = np.copysign(np.inf, w[np.abs(w) >= LARGEST])
    return rounded


def bf16_numbers(rng: Any, *shape: int) -> Doubles:
    return round_bf16(rng.standard_normal(shape))


@grid(variant=TABLES, format=FORMATS, scales=["usual", "edges"])
def test_every_weight_is_rounded_once(variant: Variant, format: Format, scales: str) -> None:
    """The unit matrix brings out the weights one by one."""
    code, group, scale_type = format.form
    edges = scales == "edges"
    for n, columns in ((33, 192), (160, 80)):
        [k] = format.fit(columns)
        source = sources.make(code, n, k, group, scale_type, seed=n, edges=edges)
        if code == FP8_ROW:  # scales that come after the sum
            source.scale[:] = 1
        source.global_scale = 1.0
        w = source.values
        expected = round_bf16(w)
        ok = np.all(np.isfinite(expected), axis=1)  # 0 * infinity would be NaN
        y = product(variant, source, np.eye(k)).T[ok].astype(float)
        w, expected = w[ok], expected[ok]
        assert len(w) or edges
        inexact_first = code == FP8_BLOCK or scale_type == FP32
        if inexact_first:  # code * scale is rounded to float32 before
            bound = np.abs(w) * 2.0**-8 * (1 + 2.0**-14)
            assert np.all(np.abs(y - w) <= np.maximum(bound, SMALLEST))
            assert np.count_nonzero((y != expected) & (np.abs(w) > 2 * SMALLEST)) <= 0.01 * y.size
        else:
            np.testing.assert_array_equal(y, expected)


@grid(variant=TABLES, format=[sources.MXFP8, sources.MXFP4])
def test_infinite_weights(variant: Variant, format: int) -> None:
    source = sources.make_scaled(format, 32, 64)
    source.scale[:] = 254
    source.codes[:] = 0x77 if format == sources.MXFP8 else 7
    source.encode()
    y = product(variant, source, np.full((3, 64), 1.0))
    assert np.all(np.isposinf(y))


@grid(variant=TABLES, format=FORMATS)
def test_every_number_of_rows(variant: Variant, format: Format) -> None:
    rng = np.random.default_rng(1)
    code, group, scale_type = format.form
    [k] = format.fit(288)  # nine units of 32 where the format allows it
    source, other = (sources.make(code, 32, k, group, scale_type, seed=s) for s in (0, 1))
    x = bf16_numbers(rng, 70, k)
    w = source.values
    exact = x @ w.T
    whole = product(variant, source, x)
    bound = np.abs(x) @ np.abs(w).T * (2.0**-8 + k * 2.0**-24)
    assert np.all(np.abs(whole - exact) <= bound)
    for m in range(1, 70):  # the same bits, however many rows come together
        # What this leaves behind must not be taken for the other one's weights.
        product(variant, other, x[:1])
        np.testing.assert_array_equal(product(variant, source, x[:m]), whole[:m])


@grid(variant=TABLES, format=QUANTISED)
def test_sums_of_exact_numbers(variant: Variant, format: Format) -> None:
    """Codes that are small integers, scales of one: every sum is exact in float32."""
    rng = np.random.default_rng(2)
    codes = {
        sources.INT4_GROUP: np.arange(16),
        sources.INT4_ZERO: np.arange(16),
        sources.MXFP4: np.array([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15]),
    }
    codes[NVFP4] = codes[sources.MXFP4]
    whole = np.flatnonzero((sources.E4M3 % 1 == 0) & (np.abs(sources.E4M3) <= 32))
    for at_least in (1, 64, 160, 320, 1100):
        [k] = format.fit(at_least)
        source = sources.make_scaled(format.code, 70, k, format.group, format.form[2])
        source.codes[:] = rng.choice(codes.get(format.code, whole), source.codes.shape)
        one = {sources.MXFP8: 127, sources.MXFP4: 127, NVFP4: 0x38}.get(format.code, 1)
        source.scale[:] = 0x3F80 if source.scale.dtype == np.uint16 else one
        source.global_scale = 1.0
        source.encode()
        x = rng.integers(-128, 129, (49, k)).astype(float)
        np.testing.assert_array_equal(product(variant, source, x), x @ source.values.T)


@grid(variant=TABLES, format=[Format(BF16), Format(INT8_ROW), Format(INT4_ROW)])
def test_dense_formats_for_every_number_of_rows(variant: Variant, format: Format) -> None:
    module = core.core_with(*variant)
    code = format.code
    rng = np.random.default_rng(3)
    w, other = bf16_numbers(rng, 2, 40, 320).astype(np.float32)
    x = bf16_numbers(rng, 70, 320).astype(np.float32)
    whole = module.product("amx", True, code, 0, w, x)
    for m in range(1, 70):
        module.product("amx", True, code, 0, other, x[:1])
        np.testing.assert_array_equal(module.product("amx", True, code, 0, w, x[:m]), whole[:m])
    if code == BF16:
        exact = x.astype(float) @ w.astype(float).T
        bound = np.abs(x).astype(float) @ np.abs(w).astype(float).T * 320 * 2.0**-24
        assert np.all(np.abs(whole[:, :40] - exact) <= bound)
    else:  # integer accumulators and the float operations after them: as the vector kernels
        np.testing.assert_array_equal(module.product("amx", False, code, 0, w, x), whole)
