"""16- and 32-bit weights to 4-bit integers with zero points."""

from __future__ import annotations

import torch

from ..runtime.tensors import on_cpu
from ..weights.formats import INT4_ZERO
from ..weights.quantised import QuantisedMatrix

_LEVELS = 15


def quantise_asymmetric(
    weights: torch.Tensor, group_size: int, per_row: bool = False, place: str = "weights"
) -> QuantisedMatrix:
    """W [N, K] as (code - zero) * scale, with code and zero in 0 .. 15.

    A group of ``group_size`` columns, or with ``per_row`` a whole row, spans the range from its
    least to its largest weight, widened to contain 0: scale = fp16((max - min) / 15), zero =
    round(-min / scale), code = round(w / scale) + zero. A row's scale and zero point are repeated
    for each of its groups.

    Args:
        weights: bf16, fp16 or fp32, any device. K is a multiple of ``group_size``, which is a
            multiple of 32.

    Raises:
        ValueError: a weight is not finite, or a range is too wide for a float16 scale; names
            ``place`` and the row.
    """
    w = on_cpu(weights, torch.float32)
    rows, columns = w.shape
    span = w if per_row else w.unflatten(1, (-1, group_size)).flatten(0, 1)
    low, high = span.amin(1).clamp_(max=0), span.amax(1).clamp_(min=0)
    scale = ((high - low) / _LEVELS).half().float()
    if not bool(scale.isfinite().all()):
        row = int((~scale.isfinite()).nonzero()[0]) * rows // len(span)
        problem = "is not finite" if not bool(w[row].isfinite().all()) else "exceeds 15 * 65504"
        raise ValueError(f"{place}: the range of row {row} {problem}; accepted: finite weights")
    safe = torch.where(scale == 0, 1, scale)  # all of the span rounds to 0
    zero = (-low / safe).round_().clamp_(0, _LEVELS)
    codes = (span / safe[:, None]).round_().add_(zero[:, None]).clamp_(0, _LEVELS)
    codes = codes.to(torch.uint8).view(rows, columns)
    groups = columns // group_size

    def by_group(values: torch.Tensor) -> torch.Tensor:
        spread = values[:, None].expand(-1, groups) if per_row else values.view(rows, groups)
        return spread.contiguous()

    return QuantisedMatrix(
        INT4_ZERO,
        codes[:, 0::2] | codes[:, 1::2] << 4,
        by_group(scale).half(),
        by_group(zero).to(torch.uint8),
    )
