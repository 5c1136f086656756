"""How far a layer's rows may be from the float64 oracle's, by table, format and kind of kernel.

The output is float32. The oracle uses the packed weights and rounded activations, so only the
kernels' own rounding is left. The error of a row is ||y - ref|| / ||ref||. LIMIT holds for all
rows. The bound of a kernel holds for three of four rows: in the others, an h may lie between two
bf16 or int8 numbers and be rounded to another one than in the oracle. That moves a row by one step
of one h, at most 2^-8 of it.

SUMS        Products and sums in float32 or exact. Measured: 4e-7.
FIXED       Activations in fixed point (kernel_table.h, kInt16Group) are within 2^-15 of the largest
            of 32, so h is off by about 1e-5, and in every second row, one of some hundred h is
            rounded the other way. Measured: 9e-5.
ROUNDED     AMX rounds the weights of some formats to bf16, each by up to 2^-8, rms 1.6e-3, in three
            successive products, and all weights of a group by similar amounts. If GEMM alone runs,
            the oracle gets rounded weights, and the bound is SUMS. This bound is for experts with
            both kinds of kernels. Measured: 6e-3, and 2.6e-2 for the worst row of 1600, a small
            difference of large numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import sources
from .core import AUTO, INTEGER, TILE, VECTOR, Floats, Layer, row_errors
from .ggml import GGML
from .layout_writer import bf16_bits
from .sources import FP8_BLOCK, INT4_GROUP, INT4_ZERO, MXFP4, NVFP4

Doubles = npt.NDArray[np.float64]

LIMIT, LIMIT_ROUNDED = 5e-3, 5e-2
SUMS, FIXED, ROUNDED = 2e-6, 1.5e-4, 8e-3


def fixed_point(table: str, code: int, kind: int) -> bool:
    """Whether kernels of this kind (AUTO: any kind) use activations in fixed point."""
    gemv = code in (INT4_GROUP, INT4_ZERO, MXFP4, NVFP4, *GGML)
    gemm = gemv and code != NVFP4 and table in ("avx512_vnni", "avx512_bf16")
    return (gemv and kind != TILE) or (gemm and kind != VECTOR)


def integers(table: str, code: int, kind: int) -> bool:
    """Whether activations are integers with a scale, which cannot represent an infinity."""
    return code in INTEGER or fixed_point(table, code, kind)


def rounds_weights(table: str, code: int) -> bool:
    """Whether GEMM rounds weights. In other formats, products of codes and scales are bf16."""
    return table == "amx" and code in (INT4_GROUP, INT4_ZERO, FP8_BLOCK, *GGML)


def bounds(layer: Layer) -> tuple[float, float]:
    """The bounds for three of four rows, and for all rows."""
    table, code = layer.variant[1], layer.format
    if layer.kind == AUTO and rounds_weights(table, code):
        return ROUNDED, LIMIT_ROUNDED
    return FIXED if fixed_point(table, code, layer.kind) else SUMS, LIMIT


def weights_of(layer: Layer) -> list[Doubles]:
    """gate, up and down [E, N, K] as the layer's kernels use them."""
    unpacked = layer.unpacked()
    if layer.kind == TILE and rounds_weights(layer.variant[1], layer.format):
        return [sources.bf16_values(bf16_bits(w)) for w in unpacked]
    return [w.astype(float) for w in unpacked]


def reference(layer: Layer, x: Floats, ids: Any, weights: Floats) -> Doubles:
    """The oracle's y for the weights that the layer's kernels use."""
    return layer.reference(x, ids, weights, weights_of(layer))


def check_errors(layer: Layer, errors: Doubles) -> None:
    most, limit = bounds(layer)
    worst = f"row errors {np.sort(errors)[::-1][:8]} of {len(errors)}, kind {layer.kind}"
    assert np.all(errors <= limit), worst
    assert (errors <= most).mean() >= 0.75, f"{worst}, three of four: {np.quantile(errors, 0.75)}"


def check(layer: Layer, *tokens: int) -> None:
    """Checks random batches of these numbers of tokens."""
    check_batches(layer, [layer.batch(t) for t in tokens])


def check_batches(layer: Layer, batches: Iterable[tuple[Floats, Any, Floats]]) -> None:
    unpacked = weights_of(layer)
    errors = [row_errors(layer.forward(*b), layer.reference(*b, unpacked)) for b in batches]
    check_errors(layer, np.concatenate(errors))
