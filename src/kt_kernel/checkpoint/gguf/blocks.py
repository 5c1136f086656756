"""Converts the rows of a GGUF tensor to the matrix that they represent, exactly.

F32, F16 and BF16 are dense. Q4_0 becomes INT4_GROUP, and MXFP4 stays MXFP4. The nibbles of both are
reordered: ggml puts columns j and j + 16 of a block into one byte, kt-moe puts neighbours there.
The blocks of the other types are kept unchanged.
"""

from __future__ import annotations

import functools

import torch

from ...weights.expert_tensors import Matrix
from ...weights.formats import BF16, INT4_GROUP, MXFP4, WeightForm, WeightFormat, ggml_formats
from ...weights.quantised import QuantisedMatrix
from ..header import TensorInfo
from .types import BY_NAME

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Bytes of codes that a thread reorders at a time, so that they stay in its cache.
_AT_A_TIME = 1 << 18
# Shifts and masks that move the low nibbles of eight bytes into the low four bytes.
_SQUEEZE = ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF))


@functools.cache
def forms() -> dict[str, WeightForm]:
    """The form of each supported ggml type. Dense types are rounded to bfloat16, as in method
    BF16."""
    return {
        **dict.fromkeys(DENSE, WeightForm(BF16)),
        "Q4_0": WeightForm(INT4_GROUP, group_size=32, scale_type=0),
        "MXFP4": WeightForm(MXFP4),
        **{format.name: WeightForm(format) for format in ggml_formats()},
    }


def form_of(info: TensorInfo) -> WeightForm:
    """The form of a tensor. Raises ValueError naming the type if no kernel supports it."""
    form = forms().get(info.dtype)
    if form is None:
        supported = ", ".join(forms())
        raise ValueError(
            f"{info} is of type {info.dtype}, which is not supported; supported: {supported}"
        )
    return form


def row_bytes(info: TensorInfo) -> int:
    """Bytes of a row."""
    kind = BY_NAME[info.dtype]
    return info.shape[-1] // kind.columns * kind.size


def to_matrix(info: TensorInfo, data: torch.Tensor, place: str) -> Matrix:
    """Converts the rows of a tensor, uint8 [N, bytes of a row]. Returns a view of `data` where its
    bytes are kept. Raises ValueError naming `place` if a scale is not finite."""
    if info.dtype in DENSE:
        return to_dense(info, data)
    kind = BY_NAME[info.dtype]
    blocks = data.unflatten(1, (-1, kind.size))
    if info.dtype == "MXFP4":
        scale = blocks[..., 0].contiguous()
        _refuse(place, scale == 255, "ue8m0 scale 255, NaN")
        return QuantisedMatrix(MXFP4, _neighbours(blocks[..., 1:]), scale)
    halves = blocks.view(torch.float16)
    for offset in kind.scales:
        numbers = halves[..., offset // 2]
        _refuse(place, ~numbers.isfinite(), f"number at byte {offset} of a block is not finite")
    if info.dtype == "Q4_0":
        scale = halves[..., 0].contiguous()
        return QuantisedMatrix(INT4_GROUP, _neighbours(blocks[..., 2:]), scale)
    return QuantisedMatrix(WeightFormat(info.dtype), data, None)


def to_dense(info: TensorInfo, data: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor, from its bytes [..., bytes]."""
    return data.view(DENSE[info.dtype])


def _neighbours(codes: torch.Tensor) -> torch.Tensor:
    """Reorders uint8 [N, blocks, 16] with columns j and j + 16 in byte j to [N, blocks * 16] with
    columns 2 j and 2 j + 1 in byte j."""
    rows, blocks, _ = codes.shape
    result = torch.empty(rows, blocks, 2, dtype=torch.int64, device="cpu")
    step = max(1, _AT_A_TIME * torch.get_num_threads() // (16 * blocks))
    for begin in range(0, rows, step):
        words = codes[begin : begin + step].contiguous().view(torch.int64)
        for half in range(2):  # of the columns: low nibbles, then high nibbles
            pairs = words >> 4 * half & 0x0F0F0F0F0F0F0F0F
            for shift, mask in _SQUEEZE:
                pairs = (pairs | pairs >> shift) & mask
            result[begin : begin + step, :, half] = pairs[..., 0] | pairs[..., 1] << 32
    return result.view(torch.uint8).flatten(1)


def _refuse(place: str, bad: torch.Tensor, what: str) -> None:
    if bool(bad.any()):
        row, block = bad.nonzero()[0].tolist()
        raise ValueError(f"{place}, row {row}, block {block}: {what}")
