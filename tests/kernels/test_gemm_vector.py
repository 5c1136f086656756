"""The GEMM kernels of the tables without AMX: every format, any number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from grid import grid

from . import core, ggml, sources
from .core import ALL_BLOCKS, QUANTISED, Format, Variant
from .sources import BF16, INT4_ROW, INT8_ROW

TABLES = [variant for variant in core.VARIANTS if variant.table != "amx"]
INTEGERS = [Format(INT8_ROW), Format(INT4_ROW)]
DENSE = [Format(BF16), *INTEGERS]
FORMATS = [*DENSE, *QUANTISED, *ALL_BLOCKS]


ROWS = 70


def random_weights(format: Format, n: int, k: int) -> Any:
    """A source, or float32 [n, k] that a dense format holds exactly."""
    if format.code >= sources.INT4_GROUP:
        return sources.make(format.code, n, k, format.group, format.form[2], seed=n + k)
    rng = np.random.default_rng([format.code, n, k])
    if format.code == BF16:
        return rng.integers(-128, 129, (n, k)).astype(np.float32)
    limit = 127 if format.code == INT8_ROW else 7
    w = rng.integers(-limit, limit + 1, (n, k))
    w[:, rng.integers(k)] = limit  # the scale of each row is 1
    return w.astype(np.float32)


def values_of(w: Any) -> npt.NDArray[np.float64]:
    return w.astype(np.float64) if isinstance(w, np.ndarray) else w.values


def random_rows(m: int, k: int) -> core.Floats:
    """Integers, which every A operand holds exactly; int8 rows with their limit in each."""
    rng = np.random.default_rng([m, k])
    x = rng.integers(-127, 128, (m, k))
    x[:, rng.integers(k)] = 127
    return x.astype(np.float32)


def product(
    variant: Variant, format: Format, w: Any, x: core.Floats, gemm: bool = True
) -> core.Floats:
    module = core.core_with(*variant)
    if isinstance(w, np.ndarray):
        return module.product(variant.table, gemm, format.code, 0, w, x)
    return module.product_quantised(variant.table, gemm, *format.form, w.shape[0], w.address, x)


def check(y: core.Floats, w: Any, x: core.Floats) -> None:
    """Within the bound of float32 summation, and zeros past the matrix's rows."""
    values = values_of(w)
    n, k = values.shape
    exact = x.astype(np.float64) @ values.T
    # One rounding per multiply-add, two per weight (value times scale times global scale).
    bound = (k + 2) * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(values).T)
    excess = np.abs(y[:, :n] - exact) - bound
    assert np.all(excess <= 0), f"row {np.unravel_index(np.argmax(excess), excess.shape)}"
    assert not np.any(y[:, n:]), "rows past the matrix must be zeros"


@grid(variant=TABLES, format=FORMATS, first=[1, 2, 3])
def test_every_number_of_rows(variant: Variant, format: Format, first: int) -> None:
    """All counts, so all shapes of register blocks; each row's bits do not depend on the others."""
    [k] = format.fit(200)
    w = random_weights(format, 40, k)
    x = random_rows(ROWS, k)
    whole = product(variant, format, w, x)
    check(whole, w, x)
    for m in range(first, ROWS + 1, 3):
        np.testing.assert_array_equal(product(variant, format, w, x[:m]), whole[:m])
    skipped = {1: 1, 2: 5, 3: 33}[first]
    np.testing.assert_array_equal(product(variant, format, w, x[skipped:]), whole[skipped:])


@grid(
    variant=TABLES,
    format=FORMATS,
    shape=[(1, 1), (31, 63), (32, 64), (33, 65), (64, 130), (7, 1000)],
)
def test_shapes(variant: Variant, format: Format, shape: tuple[int, int]) -> None:
    """Tails of rows and columns, fewer and more columns than a stretch, several tiles."""
    n, [k] = shape[0], format.fit(shape[1])
    w = random_weights(format, n, k)
    for m in (1, 4, 17, 40):
        x = random_rows(m, k)
        check(product(variant, format, w, x), w, x)


@grid(variant=TABLES, format=DENSE)
def test_integers_are_exact(variant: Variant, format: Format) -> None:
    """Sums under 2^24 of integers: nothing may be rounded."""
    for k in (64, 300, 520):
        w = random_weights(format, 33, k)
        x = random_rows(19, k)
        expected = x.astype(np.int64) @ w.astype(np.int64).T
        np.testing.assert_array_equal(product(variant, format, w, x)[:, :33], expected)


@grid(variant=TABLES, format=INTEGERS)
def test_integer_extremes(variant: Variant, format: Format) -> None:
    """The largest sums there are, where 16-bit intermediates would saturate or wrap."""
    limit = 127 if format.code == INT8_ROW else 7
    for k in (64, 1024, 65536):
        signs = np.random.default_rng(k).choice([-1, 1], k)
        for sign_w, sign_x in ((1, 1), (1, -1), (-1, -1), (signs, signs), (signs, -signs)):
            w = np.full((32, k), limit) * sign_w
            x = np.full((9, k), 127) * sign_x
            y = product(variant, format, w.astype(np.float32), x.astype(np.float32))
            # A multiple of 2^6 with few bits above: exact in float32.
            np.testing.assert_array_equal(y, x @ w.T)


@grid(variant=TABLES, format=INTEGERS)
def test_integer_kernels_have_the_bits_of_gemv(variant: Variant, format: Format) -> None:
    rng = np.random.default_rng(format.code)
    w = rng.standard_normal((70, 600)).astype(np.float32)
    x = rng.standard_normal((23, 600)).astype(np.float32)
    np.testing.assert_array_equal(
        product(variant, format, w, x), product(variant, format, w, x, gemm=False)
    )


@grid(variant=TABLES, where=lambda c: c.variant.table != "avx512_bf16")
def test_bf16_has_the_bits_of_gemv(variant: Variant) -> None:
    """Both add in ascending k, in float32, one multiply-add a column; but dpbf16 adds pairs, of
    operands in bf16."""
    rng = np.random.default_rng(5)
    w = rng.standard_normal((70, 600)).astype(np.float32)
    x = rng.standard_normal((23, 600)).astype(np.float32)
    np.testing.assert_array_equal(
        product(variant, Format(BF16), w, x), product(variant, Format(BF16), w, x, gemm=False)
    )


@grid(variant=TABLES, format=QUANTISED, scales=["usual", "edges"])
def test_every_code_and_scale(variant: Variant, format: Format, scales: str) -> None:
    """Rows of x that are 1 in one column give the weights themselves, once and exactly rounded:
    all codes, with `edges` at the smallest and the largest scales."""
    [k], edges = format.fit(192), scales == "edges"
    w = sources.make_scaled(format.code, 64, k, format.group, format.form[2], seed=3, edges=edges)
    nothing: Any = 8 if format.code == sources.INT4_GROUP else 0
    if w.zero is not None:
        w.zero = np.minimum(w.zero, 15)
        nothing = np.repeat(w.zero, format.group, axis=1)
    too_large = np.abs(w.values) > np.finfo(np.float32).max  # infinity times 0 would be NaN
    w.codes[:] = np.where(too_large, nothing, w.codes)
    if format.code in sources.E4M3_CODES:
        assert set(sources.E4M3_FINITE) <= set(w.codes.flat)
    elif not edges:
        assert set(range(16)) <= set(w.codes.flat)
    w.encode()
    y = product(variant, format, w, np.eye(k, dtype=np.float32))
    expected = w.values.T
    if format.code == sources.NVFP4:  # three factors: two roundings
        np.testing.assert_allclose(y, expected, rtol=2.0**-23, atol=2.0**-149)
    else:
        np.testing.assert_array_equal(y, expected.astype(np.float32))


@grid(variant=TABLES, format=ALL_BLOCKS, scales=["usual", "edges"])
def test_every_code_and_scale_of_blocks(variant: Variant, format: Format, scales: str) -> None:
    """The same for ggml's formats: the float32 weights of the gguf package, bit for bit."""
    w = ggml.make(format.code, 64, 512, seed=3, edges=scales == "edges")
    parts = ggml.parts_of(w)
    assert len(np.unique(parts.codes)) == 1 << ggml.CODE_BITS[format.code]
    y = product(variant, format, w, np.eye(512, dtype=np.float32))
    np.testing.assert_array_equal(y, w.values.T)


@grid(variant=TABLES, format=FORMATS)
def test_a_bad_row_stays_alone(variant: Variant, format: Format) -> None:
    [k] = format.fit(96)
    w = random_weights(format, 32, k)
    x = random_rows(13, k)
    clean = product(variant, format, w, x)
    x[4, 7] = np.nan
    y = product(variant, format, w, x)
    assert np.all(np.isnan(y[4]))
    others = np.arange(13) != 4
    np.testing.assert_array_equal(y[others], clean[others])
