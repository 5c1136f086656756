"""FP8 experts: e4m3 codes with float32 scales per 128x128 block, per row, or per matrix.

DeepSeek-V3 names the scales weight_scale_inv, although they multiply the codes; compressed-tensors
names them weight_scale. Scales may also be powers of two (ue8m0). e4m3 is OFP8 1.0's variant
without infinities ("fn").
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...weights.formats import FP8_BLOCK, FP8_ROW, WeightForm
from ...weights.quantised import QuantisedMatrix
from ..quantization import Quantization
from .codes import E4m3Codes, scale_of
from .layout import Parts
from .matrix import Shapes
from .parts import FLOATS, UE8M0, Read, check_tensor, float_scales, ue8m0_scales

#: Formats that quantising methods read, too.
CONVERTED = (FP8_BLOCK, FP8_ROW)

_BLOCK = 128
_SINGLE = ((), (1,), (1, 1))


class Fp8Block(E4m3Codes):
    """weight e4m3 [N, K]; scales [ceil(N/128), ceil(K/128)], or one for the whole matrix."""

    title = "FP8 with scales per 128x128 block"
    tensors = (
        "`weight` e4m3 [N, K]; `weight_scale_inv`, `weight_scale` or `scale`, float or ue8m0,"
        " [N/128, K/128] rounded up, or one number"
    )
    method = "FP8"
    quant_methods = ("fp8", "compressed-tensors", "modelopt", "fbgemm_fp8")
    format = FP8_BLOCK

    @classmethod
    def layer_form(
        cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization
    ) -> WeightForm:
        block = [_BLOCK, _BLOCK]
        some = scale_of(first["gate"])
        quantization.expect_value(some, ("weight_block_size",), block, tuple(block))
        return super().layer_form(first, shapes, quantization)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        blocks = -(-rows // _BLOCK), -(-columns // _BLOCK)
        # transformers drops dimensions of 1 when it splits a stack.
        line = ((max(blocks),),) if 1 in blocks else ()
        check_tensor(scale_of(parts), FLOATS + UE8M0, blocks, *line, *_SINGLE)

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = read(info, None)
        if info.dtype in UE8M0:
            scale = ue8m0_scales(info, scale).view(torch.float8_e8m0fnu)
        scale = float_scales(info, scale.float())
        blocks = -(-rows // _BLOCK), -(-columns // _BLOCK)
        scale = scale.reshape(1, 1).expand(blocks) if scale.numel() == 1 else scale.reshape(blocks)
        return QuantisedMatrix(FP8_BLOCK, self.read_codes(parts, read), scale.contiguous())


class Fp8Row(E4m3Codes):
    """weight e4m3 [N, K]; scales [N] or [N, 1]."""

    title = "FP8 with scales per row"
    tensors = (
        "`weight` e4m3 [N, K]; `weight_scale`, `weight_scale_inv` or `scale`, float, [N] or [N, 1]"
    )
    method = "FP8_PERCHANNEL"
    quant_methods = Fp8Block.quant_methods
    format = FP8_ROW

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        check_tensor(scale_of(parts), FLOATS, (rows,), (rows, 1))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = float_scales(info, read(info, None).float()).reshape(rows).contiguous()
        return QuantisedMatrix(FP8_ROW, self.read_codes(parts, read), scale)


def dequantise(matrix: QuantisedMatrix) -> torch.Tensor:
    """float32 [N, K] of an FP8 matrix, for quantising methods."""
    assert matrix.scale is not None
    weights = _floats(matrix.codes)
    scale = matrix.scale.numpy()
    if matrix.format == FP8_ROW:
        weights *= scale[:, None]
    else:
        for i, row in enumerate(scale):
            weights[i * _BLOCK : (i + 1) * _BLOCK] *= row.repeat(_BLOCK)[: weights.shape[1]]
    return torch.from_numpy(weights)


def _floats(codes: torch.Tensor) -> np.ndarray:
    """Converts codes by a table of pairs. Uses only this thread, because others are packing."""
    if codes.numel() % 2:
        return codes.float().numpy()
    pairs = codes.contiguous().view(-1).view(torch.uint8).numpy().view(np.uint16)
    return _float_pairs()[pairs].view(np.float32).reshape(codes.shape)


@functools.cache
def _float_pairs() -> np.ndarray:
    """For each pair of codes, the first in the low byte, two float32 in the place of a float64."""
    codes = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.uint16)
    values = codes.view(torch.uint8).view(torch.float8_e4m3fn).float()
    return values.numpy().view(np.float64)
