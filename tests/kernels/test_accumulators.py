"""One kernel at a time: integer products are exact, to the last unit, and floats near."""

from __future__ import annotations

from typing import Any

import numpy as np
from grid import examples, grid
from hypothesis import given, settings
from hypothesis import strategies as st

from . import core
from .core import BF16, DENSE, INT8_ROW, TILE, VARIANTS, VECTOR, Format, Kind, Variant

KINDS = (VECTOR, TILE)
# INT4_GROUP too: scales of 1 leave weights and products exact in bf16 and float32.
INTEGERS = [f for f in DENSE if f.code != BF16]


def integers(rng: Any, rows: int, columns: int, limit: int, group: int) -> core.Floats:
    """Integers in ±limit with the limit in every row (or group), so that its scale is 1."""
    values = rng.integers(-limit, limit + 1, (rows, columns))
    values[:, :: group or columns] = limit * rng.choice(
        [-1, 1], values[:, :: group or columns].shape
    )
    return values.astype(np.float32)


def product(variant: Variant, kind: Kind, format: Format, w: Any, x: Any) -> core.Floats:
    module = core.core_with(*variant)
    return module.product(variant.table, kind == TILE, format.code, format.group, w, x)


def check_exact(
    variant: Variant, kind: Kind, format: Format, rows: int, shape: tuple[int, int], seed: int
) -> None:
    out_features, [columns] = shape[0], format.fit(shape[1])
    rng = np.random.default_rng(seed)
    weight_limit = 127 if format.code == INT8_ROW else 7
    w = integers(rng, out_features, columns, weight_limit, format.group)
    x = integers(rng, rows, columns, 127, format.group)
    y = product(variant, kind, format, w, x)
    exact = x.astype(np.int64) @ w.astype(np.int64).T
    # The sums stay under 2^24 where float32 is exact.
    np.testing.assert_array_equal(y[:, :out_features], exact, err_msg=f"{rows} rows, {shape}")
    assert not np.any(y[:, out_features:]), "rows past the matrix must be zeros"


@grid(variant=VARIANTS, kind=KINDS, format=INTEGERS, goals=[core.kernel])
def test_integer_products_are_exact(variant: Variant, kind: Kind, format: Format) -> None:
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49):
        for shape in ((1, 1), (31, 63), (32, 64), (33, 65), (70, 200)):
            check_exact(variant, kind, format, rows, shape, seed=rows)


@core.formats(INTEGERS)
@given(
    rows=st.integers(1, 40),
    out_features=st.integers(1, 100),
    columns=st.integers(1, 1000),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
@settings(max_examples=examples(40), deadline=None)
def test_integer_products_are_exact_for_any_shape(
    format: Format, rows: int, out_features: int, columns: int, seed: int, data: Any
) -> None:
    variant = data.draw(st.sampled_from([v for v in VARIANTS if not v.missing]))
    kind = data.draw(st.sampled_from(KINDS))
    check_exact(variant, kind, format, rows, (out_features, columns), seed)


@grid(variant=VARIANTS, kind=KINDS, format=INTEGERS, goals=[core.kernel])
def test_extremes_are_exact(variant: Variant, kind: Kind, format: Format) -> None:
    """All weights and activations at ±limit: the largest sums there are."""
    limit = 127 if format.code == INT8_ROW else 7
    # 65536 is the largest H or I there is: 255 * 127 * 65536 is just under 2^31. Float sums of the
    # group format stop being exact before: 7 * 127 * 16384 is just under 2^24.
    for columns in (1024, 16384 if format.group and kind == TILE else 65536):
        for sign_w, sign_x in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            w = np.full((32, columns), sign_w * limit, np.float32)
            x = np.full((17, columns), sign_x * 127, np.float32)
            y = product(variant, kind, format, w, x)
            # A multiple of 2^10 with few bits above: exact in float32.
            np.testing.assert_array_equal(y, sign_w * sign_x * limit * 127 * columns)


@grid(variant=VARIANTS, kind=KINDS, rows=[1, 3, 9, 17, 33])
def test_bf16_products(variant: Variant, kind: Kind, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for out_features, columns in ((1, 1), (33, 65), (64, 300)):
        # Few mantissa bits, so that bf16 holds the operands exactly.
        w = rng.integers(-128, 129, (out_features, columns)).astype(np.float32)
        x = rng.integers(-128, 129, (rows, columns)).astype(np.float32)
        y = product(variant, kind, Format(BF16), w, x)
        # Sums of products of integers under 2^24 are exact in float32 in any order.
        np.testing.assert_array_equal(y[:, :out_features], x.astype(int) @ w.astype(int).T)
