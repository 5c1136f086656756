"""Layers whose gate, up and down are stored in different forms, against float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from grid import grid

from . import core, sources
from .core import (
    AUTO,
    BF16,
    INTEGER,
    KINDS,
    ONE_OF_EACH,
    SMALL_SWEEP,
    TILE,
    VARIANTS,
    Floats,
    Format,
    Kind,
    Layer,
    Variant,
    row_errors,
)
from .layout_writer import bf16_bits
from .oracle import FIXED, LIMIT, LIMIT_ROUNDED, ROUNDED, SUMS, fixed_point, rounds_weights

Doubles = npt.NDArray[np.float64]
Mix = tuple[Format, Format, Format]


def mixes() -> list[Mix]:
    """Every format once as gate, up and down, beside two others: all kinds of activations meet."""
    n = len(ONE_OF_EACH)
    shifted = [[ONE_OF_EACH[(i * step + 3 * step) % n] for i in range(n)] for step in (1, 3, 7)]
    made = [mix for mix in zip(*shifted, strict=True) if len(set(mix)) > 1]
    by_code = {f.code: f for f in ONE_OF_EACH}
    dense, grouped, int8, fp4 = (by_code[c] for c in (BF16, 4, 1, 8))
    return [*made, (dense, grouped, grouped), (grouped, grouped, dense), (int8, dense, fp4)]


def unit_of(mix: Mix) -> int:
    return math.lcm(*(sources.column_unit(f.code, f.group) for f in mix))


def mixed(variant: Variant, mix: Mix, hidden: int, inter: int, **rest: object) -> Layer:
    unit = unit_of(mix)
    hidden, inter = (-(-size // unit) * unit for size in (hidden, inter))
    return Layer(variant, 0, 0, 4, 2, hidden, inter, mixed=mix, **rest)


def rounded(values: Doubles, format: Format) -> Doubles:
    """An operand as kernel_table.h says: int8 with a scale per row, or bf16."""
    values = values.astype(np.float32)
    if format.code not in INTEGER:
        return sources.bf16_values(bf16_bits(values))
    absmax = np.abs(values).max(-1, keepdims=True, initial=0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.float32(127) / absmax
        q = np.where(np.isfinite(factor), np.rint(values * factor), 0)
    return q.astype(float) * (absmax / np.float32(127)).astype(float)


def reference(layer: Layer, x: Floats, ids: npt.NDArray[np.int64], weights: Floats) -> Doubles:
    unpacked = [w.astype(float) for w in layer.unpacked()]
    for m, format in enumerate(layer.mixed):
        if layer.kind == TILE and rounds_weights(layer.variant[1], format.code):
            unpacked[m] = sources.bf16_values(bf16_bits(unpacked[m].astype(np.float32)))
    y = np.zeros((len(x), layer.hidden))
    for token, choice in itertools.product(range(len(x)), range(layer.top_k)):
        slot = ids[token, choice]
        if not 0 <= slot < layer.experts or not layer.slots[slot]:
            continue
        gate, up = (
            unpacked[m][slot] @ rounded(x[token], layer.mixed[m])
            + (layer.bias[m][slot].astype(float) if layer.bias else 0)
            for m in (0, 1)
        )
        h = rounded(gate / (1 + np.exp(-gate)) * up, layer.mixed[2])
        out = unpacked[2][slot] @ h + (layer.bias[2][slot].astype(float) if layer.bias else 0)
        y[token] += float(weights[token, choice]) * out
    return y


def check(layer: Layer, *tokens: int) -> None:
    table, kind = layer.variant[1], layer.kind
    folds = kind == AUTO and any(rounds_weights(table, f.code) for f in layer.mixed)
    fixed = any(fixed_point(table, f.code, kind) for f in layer.mixed)
    # Few rows: one of four may be a bad one by chance.
    most, limit = (2 * ROUNDED, LIMIT_ROUNDED) if folds else (FIXED if fixed else SUMS, LIMIT)
    batches = [layer.batch(t) for t in tokens]
    errors = np.concatenate([row_errors(layer.forward(*b), reference(layer, *b)) for b in batches])
    assert np.all(errors <= limit), np.sort(errors)[::-1][:8]
    assert np.quantile(errors, 0.75) <= most, np.quantile(errors, 0.75)


@grid(variant=VARIANTS, mix=mixes(), kind=KINDS)
def test_mixed_forms(variant: Variant, mix: Mix, kind: Kind) -> None:
    check(mixed(variant, mix, 70, 90, kind=kind), 1, 3, 20)


@grid(variant=VARIANTS, mix=mixes()[-3:])
def test_pools_biases_and_masks(variant: Variant, mix: Mix) -> None:
    layer = mixed(
        variant,
        mix,
        96,
        2 * unit_of(mix) + 64,
        threads=(1, 2),
        biases=True,
        cpu_slots=[True, False, True, True],
    )
    check(layer, 2, 33)


@pytest.mark.skipif(SMALL_SWEEP, reason="one table is enough, and that one is not built")
@pytest.mark.parametrize("rows", list(itertools.product((1, 1000), repeat=3)), ids=str)
def test_each_matrix_changes_its_kernel_by_itself(rows: tuple[int, ...]) -> None:
    """Experts of many rows whose gate, up and down are or are not computed by GEMM kernels."""
    for table, mix in itertools.product(("amx", "avx512_vnni", "avx2"), mixes()[-3:]):
        if ("_C", table) not in VARIANTS or table not in core.module("_C").kernel_tables():
            continue
        layer = mixed(("_C", table), mix, 96, 160, kind=AUTO, gemm_min_rows=list(rows))
        check(layer, 1, 40, 300)
        calls = layer.layer.stats()
        assert (calls["tile_calls"] > 0) is (1 in rows)


def test_what_was_mixed_is_what_comes_back() -> None:
    layer = mixed(("_C", "avx2"), mixes()[-3], 64, 64)
    for got, matrix in zip(layer.unpacked(), layer.weights, strict=True):
        for slot in range(4):
            exact = (
                matrix[slot].values
                if isinstance(matrix, list)
                else sources.bf16_values(bf16_bits(matrix[slot]))
            )
            np.testing.assert_array_equal(got[slot], exact.astype(np.float32))
