"""The roundings of the specification, and what kernels may add to them.

Scalars that decide a rounding (scales, multipliers) are float32, as the rules say; everything else
is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from ..weights.formats import (
    BF16,
    FP8_BLOCK,
    INT4_GROUP,
    INT4_ROW,
    INT4_ZERO,
    INT8_ROW,
    MXFP4,
    NVFP4,
    WeightForm,
    WeightFormat,
)
from ..weights.methods import get_method
from ..weights.quantised import QuantisedMatrix
from .quantised import quantise, values_of

# What kernels may do beyond the rules of rounding (kernels/include/kt/kernel_table.h). GEMV kernels
# of integer and 4-bit weights in groups take activations in fixed point, see `_fixed_point_error`,
# and some GEMM kernels as well; those of these tables do not.
_FLOAT_GEMM = ("amx", "avx512", "avx2")
_FIXED_POINT = (INT4_GROUP, INT4_ZERO, MXFP4, NVFP4)  # and all of ggml's
_FIXED_POINT_COLUMNS, _FIXED_POINT_LARGEST = 32, 32639
# GEMM kernels of AMX round the product of a weight and its scale to bf16 where it is not exact
# (kernels/isa/unpack_bf16.inl): relative error of a weight, at most 2^-9, here as a standard
# deviation (even mantissas of 1 to 2, rounded within half a step).
_FOLDED = (INT4_GROUP, INT4_ZERO, FP8_BLOCK)  # and all of ggml's
_FOLDED_ERROR = 2**-9 * 0.41


def folds_scales(weights: WeightFormat, kind: str, table: str | None) -> bool:
    """Whether kernels that may run round the products of weights and scales."""
    folded = weights in _FOLDED or weights.ggml
    return folded and kind != "vector" and table in (None, "amx")


def _symmetric(
    w: torch.Tensor, levels: int, scale_of: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and float32 scales of the last dimension: q = RNE(w * (levels / absmax))."""
    absmax = (w if scale_of is None else scale_of).abs().amax(-1, keepdim=True)
    top = torch.tensor(float(levels), dtype=torch.float32)
    multiplier = top / absmax
    # Where the division overflows (absmax zero or next to it) everything becomes zero.
    multiplier = torch.where(multiplier.isinf(), torch.zeros_like(multiplier), multiplier)
    return (w * multiplier).round().clamp(-levels, levels), absmax / top


def form_of(method: str) -> WeightForm:
    """The form of the method's weights; groups of 32 and float16 scales where the source tells."""
    chosen = get_method(method)
    return chosen.form or WeightForm(chosen.format, group_size=32)


def quantise_weights(method: str, weights: torch.Tensor | QuantisedMatrix) -> torch.Tensor:
    """What the packed weights of ``method`` stand for.

    Args:
        method: a supported method.
        weights: [..., N, K], bf16, fp16 or fp32, finite, which is quantised here (in groups of 32
            where the method leaves it open); or a matrix that is quantised already.

    Returns:
        float64 [..., N, K], the dequantised values.
    """
    if isinstance(weights, QuantisedMatrix):
        return values_of(weights)
    chosen = get_method(method)
    if chosen.mixed or chosen.format == BF16:
        return weights.detach().cpu().float().bfloat16().double()
    if chosen.quantised:
        if weights.dim() == 2:
            return values_of(quantise(weights, form_of(method)))
        each = [quantise_weights(method, matrix) for matrix in weights.flatten(0, -3)]
        return torch.stack(each).reshape(weights.shape)
    w = weights.detach().cpu().float()
    if chosen.format in (INT8_ROW, INT4_ROW):
        q, scale = _symmetric(w, 127 if chosen.format == INT8_ROW else 7)
        return q.double() * scale.double()
    assert chosen.format == INT4_GROUP
    groups: torch.Tensor = w.unflatten(-1, (-1, chosen.group_size))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    q = torch.where(scale == 0, torch.zeros_like(groups), (groups / scale).round().clamp(-7, 7))
    return (q.double() * scale.double()).flatten(-2)


def round_activations(
    values: torch.Tensor,
    int8: bool,
    scale_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """The one rounding of x or h [..., K] before a product, as float64.

    To int8 with a scale per row, where a row with a value that is not finite becomes NaN, or to
    bfloat16. ``scale_of``: values to take the scales from instead.
    """
    values = values.float()
    if not int8:
        return values.bfloat16().double()
    q, scale = _symmetric(values, 127, None if scale_of is None else scale_of.float())
    rounded = q.double() * scale.double()
    finite = values.isfinite().all(-1, keepdim=True)
    return torch.where(finite, rounded, torch.full_like(rounded, torch.nan))


def _fixed_point_error(values: torch.Tensor) -> torch.Tensor:
    """Largest error of each of the bf16 values [..., K] when 32 columns share a unit, the smallest
    power of two of which the largest of them is at most 32639: half the unit, and none where it is
    a multiple."""
    columns = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -columns % _FIXED_POINT_COLUMNS))
    groups = padded.unflatten(-1, (-1, _FIXED_POINT_COLUMNS))
    absmax = groups.abs().amax(-1, keepdim=True)
    unit = torch.exp2(torch.ceil(torch.log2(absmax / _FIXED_POINT_LARGEST)).clamp(min=-126))
    error = torch.where(groups.remainder(unit) == 0, torch.zeros_like(groups), unit / 2)
    return error.flatten(-2)[..., :columns]


def _folded_error(values: torch.Tensor) -> torch.Tensor:
    return _FOLDED_ERROR * values.abs()


def kernel_errors(
    formats: Collection[WeightFormat], kind: str, table: str | None
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """What kernels of a kind add to rounded activations, or to weights in proportion to them, in a
    layer with weights of these formats."""
    errors: list[Callable[[torch.Tensor], torch.Tensor]] = []
    fixed_point = any(f in _FIXED_POINT or f.ggml for f in formats)
    if fixed_point and not (kind == "tile" and table in _FLOAT_GEMM):
        errors.append(_fixed_point_error)
    if any(folds_scales(f, kind, table) for f in formats):
        errors.append(_folded_error)
    return errors
