"""GEMV kernels of weights that come quantised: every code, scale and tail, on every table.

A float32 result is compared for equality: operands are chosen so that sums are exact, or have one
term only.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from grid import grid

from . import core, ggml, sources
from .core import ALL_BLOCKS, QUANTISED, VARIANTS, Format, Variant
from .ggml import GGML, GgmlSource
from .sources import E2M1, E4M3, E4M3_CODES, INT4_GROUP, INT4_ZERO, NVFP4, Source

FORMATS = [*QUANTISED, *ALL_BLOCKS]
# Activations as kInt16Group.
SCALED_FIXED_POINT = (INT4_GROUP, INT4_ZERO, sources.MXFP4, NVFP4)
FIXED_POINT = (*SCALED_FIXED_POINT, *GGML)


def make(format: Format, n: int, k: int, **options: Any) -> Any:
    return sources.make(format.code, n, k, format.group, format.form[2], **options)


def product(variant: Variant, w: Source | GgmlSource, x: Any) -> core.Floats:
    """x [m, k] times the transpose of w [n, k]; rows past n must be zeros where x is finite."""
    module = core.core_with(*variant)
    n = w.shape[0]
    y = module.product_quantised(
        variant.table,
        False,
        w.format,
        w.group,
        w.scale_type,
        n,
        w.address,
        np.ascontiguousarray(x, np.float32),
    )
    finite = np.all(np.isfinite(x), axis=1)
    assert not np.any(y[finite, n:]), "rows past the matrix must be zeros"
    return y[:, :n]


def with_few_bits(w: Any, rng: Any) -> Any:
    """The source with codes of few bits and scales of 1 and 2, so that sums are exact."""
    if isinstance(w, GgmlSource):
        for which in range(len(ggml.HALVES[w.format])):
            w.set_halves(which, rng.choice([0x3C00, 0xBC00, 0x4000], w.blocks.shape[:2]))
        return w
    if w.format in E4M3_CODES:
        few = [c for c in sources.E4M3_FINITE if abs(E4M3[c]) < 16 and E4M3[c] * 4 % 1 == 0]
        w.codes = rng.choice(np.array(few, np.uint8), w.codes.shape)
    one = np.array(1, w.scale.dtype)
    if w.format in (sources.MXFP8, sources.MXFP4):
        one = np.array(127, np.uint8)
        two = np.array(128, np.uint8)
    elif w.format == NVFP4:
        one, two = np.array(0x38, np.uint8), np.array(0x40, np.uint8)
    elif w.scale_type == sources.BFLOAT16 and w.format in sources.GROUP_FORMATS:
        one, two = np.array(0x3F80, np.uint16), np.array(0x4000, np.uint16)
    else:
        two = np.array(2, w.scale.dtype)
    w.scale = np.where(rng.integers(0, 2, w.scale.shape) == 0, one, two)
    w.global_scale = 0.5
    w.encode()
    return w


def shapes(format: Format) -> list[tuple[int, int]]:
    columns = set(format.fit(1, 48, 63, 96, 128, 200, 300, 512))
    return list(zip(itertools.cycle((1, 33, 32, 70)), sorted(columns), strict=False))


@grid(variant=VARIANTS, format=FORMATS)
def test_sums_are_exact(variant: Variant, format: Format) -> None:
    rng = np.random.default_rng(format.code)
    for n, k in shapes(format):
        w = with_few_bits(make(format, n, k, seed=k), rng)
        for rows in (1, 2, 3, 4, 5, 8, 11):
            x = rng.integers(-15, 16, (rows, k)).astype(np.float32)
            np.testing.assert_array_equal(product(variant, w, x), x @ w.values.T)


@grid(variant=VARIANTS, format=FORMATS, scales=["usual", "edges"])
def test_every_code_scale_and_column(variant: Variant, format: Format, scales: str) -> None:
    """One nonzero activation gives one weight back, rounded once: codes, their order in the packed
    steps, zeros, subnormal and huge scales."""
    n, k = 33, 256
    w = make(format, n, k, seed=7, edges=scales == "edges")
    values = [1.0, -3.0 * 2**-20]
    if isinstance(w, GgmlSource):
        assert len(np.unique(ggml.parts_of(w).codes)) == 1 << ggml.CODE_BITS[format.code]
        values = [1.0, -(2.0**-20)]  # w is rounded once already, where there is a minimum
    else:
        codes = E4M3 if format.code in E4M3_CODES else E2M1
        assert len(np.unique(w.codes)) >= len(codes) - 2, "NaN codes are the only ones left out"
    for value in values:
        with np.errstate(over="ignore"):
            expected = (w.values.T * value).astype(np.float32)
        y = product(variant, w, np.eye(k) * value)
        np.testing.assert_array_equal(y, expected)


@grid(variant=VARIANTS, format=SCALED_FIXED_POINT)
def test_extremes_of_fixed_point(variant: Variant, format: int) -> None:
    """Largest codes of both signs with the largest digits: 253 and -253 are 127 * 256 - 128 and
    -126 * 256 - 128 in units of 2^-7, 254 is 127 * 256. No sum in 16 bits may overflow."""
    group = 128 if format in sources.GROUP_FORMATS else 0
    n, k = 32, 1024
    for code, zero in itertools.product((0, 7, 8, 15), (0, 16)):
        w = sources.make_scaled(format, n, k, group)
        w.codes = np.full_like(w.codes, code)
        w.zero = None if w.zero is None else np.full_like(w.zero, zero)
        w = with_few_bits(w, np.random.default_rng(0))
        check_extreme_rows(variant, w)


def check_extreme_rows(variant: Variant, w: Any) -> None:
    k = w.shape[1]
    for value in (253.0, -253.0, 254.0, -254.0):
        for x in (np.full((4, k), value), np.tile([value, -value], (4, k // 2))):
            np.testing.assert_array_equal(product(variant, w, x), x @ w.values.T)


@grid(variant=VARIANTS, format=ALL_BLOCKS)
def test_extremes_of_fixed_point_in_blocks(variant: Variant, format: Format) -> None:
    """The same for ggml's formats: codes and scales of all bits, of none, int8 -128 and 127."""
    for fill in (0, 0xFF, 0x80, 0x7F):
        w = ggml.make(format.code, 32, 256)
        w.blocks[:] = fill
        check_extreme_rows(variant, with_few_bits(w, np.random.default_rng(0)))


@grid(variant=VARIANTS, format=FORMATS)
def test_rows_are_independent(variant: Variant, format: Format) -> None:
    """A batch has the bits of single rows, whatever its size, also beside a row with NaN or inf."""
    rng = np.random.default_rng(3)
    k = 512
    w = make(format, 40, k, seed=3)
    x = rng.standard_normal((9, k)) * 2.0 ** rng.integers(-20, 20, (9, 1))
    alone = np.concatenate([product(variant, w, row[None]) for row in x])
    assert np.all(np.isfinite(alone))
    for rows in range(1, 10):
        np.testing.assert_array_equal(product(variant, w, x[:rows]), alone[:rows])
    for bad in (np.nan, np.inf):
        spoilt = x.copy()
        spoilt[2, k // 2] = bad
        y = product(variant, w, spoilt)
        np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(alone, 2, 0))
        if np.isnan(bad) or format.code in FIXED_POINT:
            assert np.all(np.isnan(y[2]))
        else:  # infinite with the weight's sign; zero times infinity is NaN
            weight = w.values[:, k // 2]
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(y[2], weight * bad)


@grid(variant=VARIANTS, format=FORMATS)
def test_random_products(variant: Variant, format: Format) -> None:
    """Near the float64 product: float32 sums, and for fixed point 2^-15 of a group's largest."""
    rng = np.random.default_rng(5)
    w = make(format, 64, 512, seed=5)
    x = bf16(rng.standard_normal((4, 512)))
    y = product(variant, w, x)
    limit = 2e-5 if format.code in FIXED_POINT else 1e-6
    error = np.abs(y - x @ w.values.T)
    assert np.all(error <= limit * (np.abs(x) @ np.abs(w.values).T))


def bf16(x: Any) -> Any:
    """x, cut to bf16."""
    bits = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)
