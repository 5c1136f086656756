"""AMX products of every weight format against float64, with real and emulated tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from . import core, sources
from .sources import BF16, FP8_BLOCK, FP8_ROW, FP32, INT4_ROW, INT8_ROW, NVFP4, Doubles

MODULES = ("_C", "_C_emul")
modules = pytest.mark.parametrize("name", MODULES)
quantised = pytest.mark.parametrize(
    "format,group,scale_type",
    sources.VARIANTS,
    ids=["-".join(map(str, v)) for v in sources.VARIANTS],
)
SMALLEST = 2.0**-126  # below it bf16 is subnormal, which the tile unit takes for zero
LARGEST = (2 - 2.0**-8) * 2.0**127  # from here on bf16 is infinite


def product(name: str, source: Any, x: npt.NDArray[Any]) -> core.Floats:
    n, k = source.shape
    assert x.shape[1] == k
    y = core.core_with(name, "amx").product_quantised(
        "amx", True, source.format, source.group, source.scale_type, n, source.address,
        np.ascontiguousarray(x, np.float32),
    )  # fmt: skip
    assert not np.any(y[:, n:]), "rows past the matrix must be zeros"
    return y[:, :n]


def round_bf16(w: Doubles) -> Doubles:
    """To nearest, ties to even; subnormals to zero."""
    mantissa, exponent = np.frexp(w)
    rounded = np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    rounded[np.abs(rounded) < SMALLEST] = 0
    rounded[np.abs(w) >= LARGEST] = np.copysign(np.inf, w[np.abs(w) >= LARGEST])
    return rounded


def columns_for(format: int, group: int, at_least: int) -> int:
    unit = sources.column_unit(format, group)
    return -(-at_least // unit) * unit


def bf16_numbers(rng: Any, *shape: int) -> Doubles:
    return round_bf16(rng.standard_normal(shape))


@modules
@quantised
@pytest.mark.parametrize("edges", [False, True], ids=["usual", "extreme"])
def test_every_weight_is_rounded_once(
    name: str, format: int, group: int, scale_type: int, edges: bool
) -> None:
    """The unit matrix brings out the weights one by one."""
    for n, k in ((33, 192), (160, 80)):
        k = columns_for(format, group, k)
        source = sources.make(format, n, k, group, scale_type, seed=n, edges=edges)
        if format == FP8_ROW:  # scales that come after the sum
            source.scale[:] = 1
        source.global_scale = 1.0
        w = source.values
        expected = round_bf16(w)
        ok = np.all(np.isfinite(expected), axis=1)  # 0 * infinity would be NaN
        y = product(name, source, np.eye(k)).T[ok].astype(float)
        w, expected = w[ok], expected[ok]
        assert len(w) or edges
        inexact_first = format == FP8_BLOCK or scale_type == FP32
        if inexact_first:  # code * scale is rounded to float32 before
            bound = np.abs(w) * 2.0**-8 * (1 + 2.0**-14)
            assert np.all(np.abs(y - w) <= np.maximum(bound, SMALLEST))
            assert np.count_nonzero((y != expected) & (np.abs(w) > 2 * SMALLEST)) <= 0.01 * y.size
        else:
            np.testing.assert_array_equal(y, expected)


@modules
@pytest.mark.parametrize("format", [sources.MXFP8, sources.MXFP4])
def test_infinite_weights(name: str, format: int) -> None:
    source = sources.make_scaled(format, 32, 64)
    source.scale[:] = 254
    source.codes[:] = 0x77 if format == sources.MXFP8 else 7
    source.encode()
    y = product(name, source, np.full((3, 64), 1.0))
    assert np.all(np.isposinf(y))


@modules
@quantised
def test_every_number_of_rows(name: str, format: int, group: int, scale_type: int) -> None:
    rng = np.random.default_rng(1)
    k = columns_for(format, group, 288)  # nine units of 32 where the format allows it
    source, other = (sources.make(format, 32, k, group, scale_type, seed=s) for s in (0, 1))
    x = bf16_numbers(rng, 70, k)
    w = source.values
    exact = x @ w.T
    whole = product(name, source, x)
    bound = np.abs(x) @ np.abs(w).T * (2.0**-8 + k * 2.0**-24)
    assert np.all(np.abs(whole - exact) <= bound)
    for m in range(1, 70):  # the same bits, however many rows come together
        product(
            name, other, x[:1]
        )  # what it leaves behind must not be taken for this one's weights
        np.testing.assert_array_equal(product(name, source, x[:m]), whole[:m])


@modules
@pytest.mark.parametrize("format,group,scale_type", sources.SCALED_VARIANTS)
def test_sums_of_exact_numbers(name: str, format: int, group: int, scale_type: int) -> None:
    """Codes that are small integers, scales of one: every sum is exact in float32."""
    rng = np.random.default_rng(2)
    codes = {
        sources.INT4_GROUP: np.arange(16), sources.INT4_ZERO: np.arange(16),
        sources.MXFP4: np.array([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15]),
    }  # fmt: skip
    codes[NVFP4] = codes[sources.MXFP4]
    whole = np.flatnonzero((sources.E4M3 % 1 == 0) & (np.abs(sources.E4M3) <= 32))
    for at_least in (1, 64, 160, 320, 1100):
        k = columns_for(format, group, at_least)
        source = sources.make_scaled(format, 70, k, group, scale_type)
        source.codes[:] = rng.choice(codes.get(format, whole), source.codes.shape)
        one = {sources.MXFP8: 127, sources.MXFP4: 127, NVFP4: 0x38}.get(format, 1)
        source.scale[:] = 0x3F80 if source.scale.dtype == np.uint16 else one
        source.global_scale = 1.0
        source.encode()
        x = rng.integers(-128, 129, (49, k)).astype(float)
        np.testing.assert_array_equal(product(name, source, x), x @ source.values.T)


@modules
@pytest.mark.parametrize("format", [BF16, INT8_ROW, INT4_ROW])
def test_dense_formats_for_every_number_of_rows(name: str, format: int) -> None:
    module = core.core_with(name, "amx")
    rng = np.random.default_rng(3)
    w, other = bf16_numbers(rng, 2, 40, 320).astype(np.float32)
    x = bf16_numbers(rng, 70, 320).astype(np.float32)
    whole = module.product("amx", True, format, 0, w, x)
    for m in range(1, 70):
        module.product("amx", True, format, 0, other, x[:1])
        np.testing.assert_array_equal(module.product("amx", True, format, 0, w, x[:m]), whole[:m])
    if format == BF16:
        exact = x.astype(float) @ w.astype(float).T
        bound = np.abs(x).astype(float) @ np.abs(w).astype(float).T * 320 * 2.0**-24
        assert np.all(np.abs(whole[:, :40] - exact) <= bound)
    else:  # integer accumulators and the float operations after them: as the vector kernels
        np.testing.assert_array_equal(module.product("amx", False, format, 0, w, x), whole)
