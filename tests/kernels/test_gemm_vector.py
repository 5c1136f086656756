"""The GEMM kernels of the tables without AMX: every format, any number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from . import core, ggml, sources
from .sources import BF16, INT4_ROW, INT8_ROW

TABLES = [(module, table) for module, table in core.VARIANTS if table != "amx"]
tables = pytest.mark.parametrize("name,table", TABLES, ids=[f"{m}-{t}" for m, t in TABLES])
DENSE = [(BF16, 0, 0), (INT8_ROW, 0, 0), (INT4_ROW, 0, 0)]
FORMATS = [*DENSE, *sources.VARIANTS]
formats = pytest.mark.parametrize("format,group,scale_type", FORMATS)


ROWS = range(1, 71)


def columns_of(format: int, group: int, columns: int) -> int:
    unit = sources.column_unit(format, group)
    return -(-columns // unit) * unit


def random_weights(format: int, group: int, scale_type: int, n: int, k: int) -> Any:
    """A source, or float32 [n, k] that a dense format holds exactly."""
    if format >= sources.INT4_GROUP:
        return sources.make(format, n, k, group, scale_type, seed=n + k)
    rng = np.random.default_rng([format, n, k])
    if format == BF16:
        return rng.integers(-128, 129, (n, k)).astype(np.float32)
    limit = 127 if format == INT8_ROW else 7
    w = rng.integers(-limit, limit + 1, (n, k))
    w[:, rng.integers(k)] = limit  # the scale of each row is 1
    return w.astype(np.float32)


def values_of(w: Any) -> npt.NDArray[np.float64]:
    return w.astype(np.float64) if isinstance(w, np.ndarray) else w.values


def random_rows(format: int, m: int, k: int) -> core.Floats:
    """Integers, which every A operand holds exactly; int8 rows with their limit in each."""
    rng = np.random.default_rng([m, k])
    x = rng.integers(-127, 128, (m, k))
    x[:, rng.integers(k)] = 127
    return x.astype(np.float32)


def product(
    name: str, table: str, w: Any, format: int, x: core.Floats, gemm: bool = True
) -> core.Floats:
    module = core.core_with(name, table)
    if isinstance(w, np.ndarray):
        return module.product(table, gemm, format, 0, w, x)
    return module.product_quantised(
        table, gemm, format, w.group, w.scale_type, w.shape[0], w.address, x
    )


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


@tables
@formats
def test_every_number_of_rows(
    name: str, table: str, format: int, group: int, scale_type: int
) -> None:
    """All counts, so all shapes of register blocks; each row's bits do not depend on the others."""
    k = columns_of(format, group, 200)
    w = random_weights(format, group, scale_type, 40, k)
    x = random_rows(format, max(ROWS), k)
    whole = product(name, table, w, format, x)
    check(whole, w, x)
    for m in ROWS:
        np.testing.assert_array_equal(product(name, table, w, format, x[:m]), whole[:m])
    for first in (1, 5, 33):
        np.testing.assert_array_equal(product(name, table, w, format, x[first:]), whole[first:])


@tables
@formats
@pytest.mark.parametrize("n,k", [(1, 1), (31, 63), (32, 64), (33, 65), (64, 130), (7, 1000)])
def test_shapes(
    name: str, table: str, format: int, group: int, scale_type: int, n: int, k: int
) -> None:
    """Tails of rows and columns, fewer and more columns than a stretch, several tiles."""
    k = columns_of(format, group, k)
    w = random_weights(format, group, scale_type, n, k)
    for m in (1, 4, 17, 40):
        x = random_rows(format, m, k)
        check(product(name, table, w, format, x), w, x)


@tables
@pytest.mark.parametrize("format", [BF16, INT8_ROW, INT4_ROW])
def test_integers_are_exact(name: str, table: str, format: int) -> None:
    """Sums under 2^24 of integers: nothing may be rounded."""
    for k in (64, 300, 520):
        w = random_weights(format, 0, 0, 33, k)
        x = random_rows(format, 19, k)
        expected = x.astype(np.int64) @ w.astype(np.int64).T
        np.testing.assert_array_equal(product(name, table, w, format, x)[:, :33], expected)


@tables
@pytest.mark.parametrize("format", [INT8_ROW, INT4_ROW])
def test_integer_extremes(name: str, table: str, format: int) -> None:
    """The largest sums there are, where 16-bit intermediates would saturate or wrap."""
    limit = 127 if format == INT8_ROW else 7
    for k in (64, 1024, 65536):
        signs = np.random.default_rng(k).choice([-1, 1], k)
        for sign_w, sign_x in ((1, 1), (1, -1), (-1, -1), (signs, signs), (signs, -signs)):
            w = np.full((32, k), limit) * sign_w
            x = np.full((9, k), 127) * sign_x
            y = product(name, table, w.astype(np.float32), format, x.astype(np.float32))
            # A multiple of 2^6 with few bits above: exact in float32.
            np.testing.assert_array_equal(y, x @ w.T)


@tables
@pytest.mark.parametrize("format", [INT8_ROW, INT4_ROW])
def test_integer_kernels_have_the_bits_of_gemv(name: str, table: str, format: int) -> None:
    rng = np.random.default_rng(format)
    w = rng.standard_normal((70, 600)).astype(np.float32)
    x = rng.standard_normal((23, 600)).astype(np.float32)
    np.testing.assert_array_equal(
        product(name, table, w, format, x), product(name, table, w, format, x, gemm=False)
    )


@tables
def test_bf16_has_the_bits_of_gemv(name: str, table: str) -> None:
    """Both add in ascending k, in float32, one multiply-add a column; but dpbf16 adds pairs."""
    if table == "avx512_bf16":
        pytest.skip("GEMV takes bf16 operands there")
    rng = np.random.default_rng(5)
    w = rng.standard_normal((70, 600)).astype(np.float32)
    x = rng.standard_normal((23, 600)).astype(np.float32)
    np.testing.assert_array_equal(
        product(name, table, w, BF16, x), product(name, table, w, BF16, x, gemm=False)
    )


@tables
@pytest.mark.parametrize("format,group,scale_type", sources.SCALED_VARIANTS)
@pytest.mark.parametrize("edges", [False, True])
def test_every_code_and_scale(
    name: str, table: str, format: int, group: int, scale_type: int, edges: bool
) -> None:
    """Rows of x that are 1 in one column give the weights themselves, once and exactly rounded:
    all codes, with `edges` at the smallest and the largest scales."""
    k = columns_of(format, group, 192)
    w = sources.make_scaled(format, 64, k, group, scale_type, seed=3, edges=edges)
    nothing: Any = 8 if format == sources.INT4_GROUP else 0
    if w.zero is not None:
        w.zero = np.minimum(w.zero, 15)
        nothing = np.repeat(w.zero, group, axis=1)
    too_large = np.abs(w.values) > np.finfo(np.float32).max  # infinity times 0 would be NaN
    w.codes[:] = np.where(too_large, nothing, w.codes)
    if format in sources.E4M3_CODES:
        assert set(sources.E4M3_FINITE) <= set(w.codes.flat)
    elif not edges:
        assert set(range(16)) <= set(w.codes.flat)
    w.encode()
    y = product(name, table, w, format, np.eye(k, dtype=np.float32))
    expected = w.values.T
    if format == sources.NVFP4:  # three factors: two roundings
        np.testing.assert_allclose(y, expected, rtol=2.0**-23, atol=2.0**-149)
    else:
        np.testing.assert_array_equal(y, expected.astype(np.float32))


@tables
@pytest.mark.parametrize("format", ggml.GGML)
@pytest.mark.parametrize("edges", [False, True])
def test_every_code_and_scale_of_blocks(name: str, table: str, format: int, edges: bool) -> None:
    """The same for ggml's formats: the float32 weights of the gguf package, bit for bit."""
    w = ggml.make(format, 64, 512, seed=3, edges=edges)
    parts = ggml.parts_of(w)
    assert len(np.unique(parts.codes)) == 1 << ggml.CODE_BITS[format]
    y = product(name, table, w, format, np.eye(512, dtype=np.float32))
    np.testing.assert_array_equal(y, w.values.T)


@tables
@formats
def test_a_bad_row_stays_alone(
    name: str, table: str, format: int, group: int, scale_type: int
) -> None:
    k = columns_of(format, group, 96)
    w = random_weights(format, group, scale_type, 32, k)
    x = random_rows(format, 13, k)
    clean = product(name, table, w, format, x)
    x[4, 7] = np.nan
    y = product(name, table, w, format, x)
    assert np.all(np.isnan(y[4]))
    others = np.arange(13) != 4
    np.testing.assert_array_equal(y[others], clean[others])
