"""MXFP8 and MXFP4 experts: e4m3 or e2m1 codes with ue8m0 scales per 32 columns.

The formats are those of OCP Microscaling Formats 1.0. DeepSeek-V4 stores MXFP4 as weight and scale,
compressed-tensors as weight_packed and weight_scale, gpt-oss in stacks (gpt_oss.py). In all of
them, the low nibble comes first.
"""

from __future__ import annotations

import torch

from ...weights.formats import MXFP4, MXFP8
from ...weights.quantised import QuantisedMatrix
from ..header import TensorInfo
from .codes import E2m1Codes, E4m3Codes, scale_of
from .layout import Parts
from .parts import UE8M0, Read, check_tensor, ue8m0_scales

BLOCK = 32


class MxFp8(E4m3Codes):
    """weight e4m3 [N, K]; weight_scale_inv or weight_scale [N, K/32]."""

    title = "MXFP8"
    tensors = (
        "`weight` e4m3 [N, K]; `weight_scale_inv`, `weight_scale` or `scale`, ue8m0, [N, K/32]"
    )
    method = "MXFP8"
    formats = (MXFP8,)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        _check_scales(parts, rows, columns)

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        return QuantisedMatrix(MXFP8, self.read_codes(parts, read), _read_scales(parts, read))


class MxFp4(E2m1Codes):
    """weight or weight_packed [N, K/2] bytes; scale or weight_scale [N, K/32]."""

    title = "MXFP4"
    tensors = (
        "`weight` or `weight_packed` e2m1, two in a byte, [N, K/2]; `weight_scale`, "
        "`weight_scale_inv` or `scale`, ue8m0, [N, K/32]"
    )
    method = "MXFP4"
    formats = (MXFP4,)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        _check_scales(parts, rows, columns)

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        return QuantisedMatrix(MXFP4, self.read_codes(parts, read), _read_scales(parts, read))


def stacked_matrix(blocks: torch.Tensor, scales: torch.Tensor, info: TensorInfo) -> QuantisedMatrix:
    """A matrix from gpt-oss's blocks uint8 [N, K/32, 16] and scales [N, K/32] of tensor `info`."""
    return QuantisedMatrix(
        MXFP4, blocks.flatten(1).contiguous(), ue8m0_scales(info, scales).contiguous()
    )


def _check_scales(parts: Parts, rows: int, columns: int) -> None:
    check_tensor(scale_of(parts), UE8M0, (rows, columns // BLOCK))


def _read_scales(parts: Parts, read: Read) -> torch.Tensor:
    info = scale_of(parts)
    return ue8m0_scales(info, read(info, None)).contiguous()
