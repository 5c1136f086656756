"""Weights to 4-bit codes with a scale per group, as the compiled core rounds them."""

from __future__ import annotations

import torch

from .formats import INT4_GROUP
from .quantised import QuantisedMatrix

_LARGEST = 7


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
