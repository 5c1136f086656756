"""Weights to 4-bit codes with a scale per group, and to 8-bit codes with a scale per row."""

from __future__ import annotations

import torch

from .formats import INT4_GROUP, INT8_ROW
from .quantised import QuantisedMatrix

_LARGEST, _LARGEST_8 = 7, 127


def quantise_groups(
    weights: torch.Tensor, group_size: int, dtype: torch.dtype, place: str = "weights"
) -> QuantisedMatrix:
    """W [N, K] as (code - 8) * scale: scale = absmax / 7 of a group, rounded to ``dtype``, and
    code = round(w / scale) + 8, clamped to 0 .. 15.

    Args:
        weights: bf16, fp16 or fp32, on any device, where the result is, too. K is a multiple of
            ``group_size``.
        dtype: of the scales, bfloat16, float16 or float32.

    Raises:
        ValueError: a weight is not finite or too large for a scale; names ``place`` and the row.
    """
    groups = weights.float().unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(-1) / _LARGEST).to(dtype)
    if not bool(scale.isfinite().all()):
        row = int((~scale.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"{place}: row {row} has a weight that is not finite, or too large")
    divisor = scale.float()
    divisor = torch.where(divisor == 0, 1, divisor)  # all of the group rounds to 0
    codes = (groups / divisor[..., None]).round_().clamp_(-_LARGEST - 1, _LARGEST)
    codes = (codes + (_LARGEST + 1)).to(torch.uint8).flatten(1)
    return QuantisedMatrix(INT4_GROUP, codes[:, 0::2] | codes[:, 1::2] << 4, scale)


def quantise_rows(weights: torch.Tensor, place: str = "weights") -> QuantisedMatrix:
    """W [N, K] as code * scale: scale = absmax / 127 of a row, and code = round(w / scale).

    weights: bf16, fp16 or fp32, on any device, where the result is, too. Raises ValueError for a
    weight that is not finite; names ``place`` and the row.
    """
    w = weights.float()
    largest = w.abs().amax(1)
    if not bool(largest.isfinite().all()):
        row = int((~largest.isfinite()).nonzero()[0])
        raise ValueError(f"{place}: row {row} has a weight that is not finite")
    scale = largest / _LARGEST_8
    divisor = torch.where(scale == 0, 1, scale)[:, None]  # all of the row rounds to 0
    codes = (w / divisor).round_().clamp_(-_LARGEST_8, _LARGEST_8).to(torch.int8)
    return QuantisedMatrix(INT8_ROW, codes, scale)
