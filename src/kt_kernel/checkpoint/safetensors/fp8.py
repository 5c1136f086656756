"""FP8 experts: e4m3 codes with float32 scales per 128x128 block, per row, or per matrix.

DeepSeek-V3 names the scales weight_scale_inv, although they multiply the codes; compressed-tensors
names them weight_scale. Scales may also be powers of two (ue8m0). e4m3 is OFP8 1.0's variant
without infinities ("fn").
"""

from __future__ import annotations

from typing import Self

import torch

from ...weights.formats import BLOCK_SIZE, FP8_BLOCK, FP8_ROW
from ...weights.quantised import QuantisedMatrix
from ..quantization import Quantization
from .codes import E4m3Codes, scale_of
from .layout import Parts
from .parts import FLOATS, UE8M0, Read, check_tensor, float_scales, ue8m0_scales

_SINGLE = ((), (1,), (1, 1))


class Fp8Block(E4m3Codes):
    """weight e4m3 [N, K]; scales [ceil(N/128), ceil(K/128)], or one for the whole matrix."""

    title = "FP8 with scales per 128x128 block"
    tensors = (
        "`weight` e4m3 [N, K]; `weight_scale_inv`, `weight_scale` or `scale`, float or ue8m0,"
        " [N/128, K/128] rounded up, or one number"
    )
    method = "FP8"
    formats = (FP8_BLOCK,)

    @classmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> Self:
        info, block = scale_of(parts), [BLOCK_SIZE, BLOCK_SIZE]
        if info.shape not in _SINGLE:
            quantization.expect_value(info, ("weight_block_size",), block)
        return super().open(parts, rows, columns, quantization)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        blocks = -(-rows // BLOCK_SIZE), -(-columns // BLOCK_SIZE)
        # transformers drops dimensions of 1 when it splits a stack.
        line = ((max(blocks),),) if 1 in blocks else ()
        check_tensor(scale_of(parts), FLOATS + UE8M0, blocks, *line, *_SINGLE)

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = read(info, None)
        if info.dtype in UE8M0:
            scale = ue8m0_scales(info, scale).view(torch.float8_e8m0fnu)
        scale = float_scales(info, scale.float())
        blocks = -(-rows // BLOCK_SIZE), -(-columns // BLOCK_SIZE)
        scale = scale.reshape(1, 1).expand(blocks) if scale.numel() == 1 else scale.reshape(blocks)
        return QuantisedMatrix(FP8_BLOCK, self.read_codes(parts, read), scale.contiguous())


class Fp8Row(E4m3Codes):
    """weight e4m3 [N, K]; scales [N] or [N, 1]."""

    title = "FP8 with scales per row"
    tensors = (
        "`weight` e4m3 [N, K]; `weight_scale`, `weight_scale_inv` or `scale`, float, [N] or [N, 1]"
    )
    method = "FP8_PERCHANNEL"
    formats = (FP8_ROW,)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        check_tensor(scale_of(parts), FLOATS, (rows,), (rows, 1))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = float_scales(info, read(info, None).float()).reshape(rows).contiguous()
        return QuantisedMatrix(FP8_ROW, self.read_codes(parts, read), scale)
