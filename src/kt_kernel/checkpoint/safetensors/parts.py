"""Checks and conversions of single tensors that the readers of quantised formats share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..header import TensorInfo

# Returns a tensor or, if an index is given, that entry along its first dimension.
Read = Callable[[TensorInfo, int | None], torch.Tensor]

FLOATS = ("F32", "BF16", "F16")
UE8M0 = ("U8", "F8_E8M0")

_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # as bits


def check_tensor(info: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Raises ValueError naming file and tensor for another dtype or shape."""
    if info.dtype not in dtypes:
        reason = ""
        if info.dtype == "F8_E4M3FNUZ":
            reason = "; this variant of e4m3 has another bias and is not supported"
        raise ValueError(f"{info} has dtype {info.dtype}; expected {' or '.join(dtypes)}{reason}")
    if info.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{info} has shape {list(info.shape)}; expected {expected}")


def signed_scales(info: TensorInfo, scale: torch.Tensor) -> torch.Tensor:
    """Returns the scales of integer codes, which may be negative: AutoRound divides the value with
    the largest magnitude by the lowest code. Raises ValueError if one is not finite."""
    if not _all_finite(scale):
        _refuse(info, scale, ~scale.isfinite(), "a finite number")
    return scale


def float_scales(info: TensorInfo, scale: torch.Tensor) -> torch.Tensor:
    """Returns the scales. Raises ValueError if one is negative or not finite."""
    if not _bits_below(scale, _INFINITY[scale.dtype]):  # may also be -0, which is fine
        _refuse(info, scale, ~(scale.isfinite() & (scale >= 0)), "a finite number from 0")
    return scale


def ue8m0_scales(info: TensorInfo, scale: torch.Tensor) -> torch.Tensor:
    """The codes as uint8: code c means 2^(c - 127). Raises ValueError for 255 (NaN)."""
    codes = scale.view(torch.uint8)
    if not _bits_below(codes, 255):
        _refuse(info, codes, codes == 255, "ue8m0 codes 0 to 254 (255 is NaN)")
    return codes


def e4m3_scales(info: TensorInfo, scale: torch.Tensor) -> torch.Tensor:
    """Returns the scales. Raises ValueError if one is negative (including -0) or NaN."""
    codes = scale.view(torch.uint8)
    if not _bits_below(codes, 0x7F):
        _refuse(info, scale.float(), codes >= 0x7F, "a finite number from 0")
    return scale


def single(info: TensorInfo, value: torch.Tensor) -> float:
    """The only element of a tensor. Raises ValueError if it is negative or not finite."""
    return float(float_scales(info, value.float()).reshape(()))


def nibbles(
    words: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))
) -> torch.Tensor:
    """Unpacks int32 to uint8, eight per word along `dim`: element order[i] is in bits 4i."""
    shifts = torch.tensor([4 * order.index(i) for i in range(8)], dtype=torch.int32, device="cpu")
    parts = (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8)
    return parts.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _bits_below(values: torch.Tensor, limit: int) -> bool:
    """Whether all values, taken as unsigned numbers, are below `limit`. One pass with numpy: scales
    are checked while other experts are packed, and torch would wake its threads."""
    return int(_unsigned(values).max(initial=0)) < limit


def _all_finite(values: torch.Tensor) -> bool:
    """Whether all floats are finite; with numpy for the same reason."""
    exponent = _INFINITY[values.dtype]
    return not ((_unsigned(values) & exponent) == exponent).any()


def _unsigned(values: torch.Tensor) -> np.ndarray:
    """The bits of the values."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[values.element_size()]
    return values.view(unsigned).numpy()


def _refuse(info: TensorInfo, values: torch.Tensor, bad: torch.Tensor, accepted: str) -> None:
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        value = values[tuple(where)].item()
        raise ValueError(f"{info}: the scale at {where} is {value:g}; accepted: {accepted}")
