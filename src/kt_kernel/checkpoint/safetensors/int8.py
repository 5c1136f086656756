"""8-bit integers with symmetric scales: per row, or per group of columns.

compressed-tensors (int-quantized, W8A8) stores weight int8 [N, K] with weight_scale [N, 1], [N] or
one number, and per group [N, K/g]. W = code * scale. GPTQ and pack-quantized store 8 bits, too
(gptq.py, pack_quantized.py).
"""

from __future__ import annotations

import torch

from ...weights.formats import INT8_ROW, Q8_0, WeightForm
from ...weights.methods import MIXED
from ...weights.quantised import QuantisedMatrix
from ..header import TensorInfo
from ..quantization import Quantization
from .codes import scale_of
from .groups import Groups, groups_of
from .layout import Parts
from .matrix import MatrixFormat, two_dimensions
from .parts import FLOATS, Read, check_tensor, signed_scales

_SINGLE = ((), (1,), (1, 1))
_BLOCK = 32


class Int8Row(MatrixFormat):
    """weight int8 [N, K]; weight_scale [N], [N, 1] or one number."""

    title = "8-bit integers with scales per row"
    tensors = "`weight` int8 [N, K]; `weight_scale` float [N, 1], [N], or one number"
    method = "AMXINT8"
    formats = (INT8_ROW,)
    stacked = True

    @classmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> Int8Row:
        return cls(WeightForm(INT8_ROW))

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        check_tensor(parts["weight"], ("I8",), (rows, columns))
        check_tensor(scale_of(parts), FLOATS, (rows,), (rows, 1), *_SINGLE)

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = signed_scales(info, read(info, None).float()).reshape(-1).expand(rows)
        return QuantisedMatrix(INT8_ROW, read(parts["weight"], None), scale.contiguous())


class Int8Group(MatrixFormat):
    """weight int8 [N, K]; weight_scale [N, K/g]."""

    title = "8-bit integers with scales per group"
    tensors = "`weight` int8 [N, K]; `weight_scale` float [N, K/g]"
    method = MIXED
    formats = (Q8_0,)

    def __init__(self, groups: Groups) -> None:
        super().__init__(WeightForm(Q8_0))
        self._groups = groups

    @classmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> Int8Group:
        info = scale_of(parts)
        count = two_dimensions(info)[1]
        return cls(groups_of(info, columns, count, quantization.group_sizes(info)))

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        check_tensor(parts["weight"], ("I8",), (rows, columns))
        check_tensor(scale_of(parts), FLOATS, (rows, self._groups.count))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = signed_scales(info, read(info, None))
        return q8_0(info, read(parts["weight"], None), scale, self._groups)


def refuse_order(info: TensorInfo, order: torch.Tensor | None) -> None:
    """Raises ValueError naming file and tensor if columns of 8-bit groups have an order."""
    if order is not None:
        raise ValueError(
            f"{info}: the columns of 8-bit groups are in another order (desc_act, actorder), which"
            " is not supported; accepted: groups of consecutive columns"
        )


def from_offset_bytes(
    info: TensorInfo,
    packed: torch.Tensor,
    scale: torch.Tensor,
    groups: Groups,
) -> QuantisedMatrix:
    """A matrix of 8-bit codes that are stored plus 128, uint8 [N, K]. Raises as `q8_0`."""
    return q8_0(info, (packed ^ 128).view(torch.int8), scale, groups)


def q8_0(
    info: TensorInfo, codes: torch.Tensor, scale: torch.Tensor, groups: Groups
) -> QuantisedMatrix:
    """A matrix of int8 codes [N, K] and scales [N, count] of tensor `info`, in ggml's blocks Q8_0:
    a float16 scale and 32 codes. The scale of a group is repeated in all of its blocks.

    Raises ValueError naming file and tensor if a scale is not exactly a float16.
    """
    halves = scale.half()
    inexact = halves.float() != scale.float()
    if bool(inexact.any()):
        where = inexact.nonzero()[0].tolist()
        raise ValueError(
            f"{info}: the scale at {where} is {scale[tuple(where)].item():g}, which float16 rounds;"
            " accepted with 8-bit groups: scales that are exact in float16"
        )
    rows, columns = codes.shape
    first = torch.arange(0, columns, _BLOCK, device="cpu")
    blocks = torch.empty(rows, columns // _BLOCK, 2 + _BLOCK, dtype=torch.uint8, device="cpu")
    spread = halves.index_select(1, first // groups.size)
    blocks[..., :2] = spread.unsqueeze(-1).view(torch.uint8)
    blocks[..., 2:] = codes.view(torch.uint8).unflatten(1, (-1, _BLOCK))
    return QuantisedMatrix(Q8_0, blocks.flatten(1), None)
