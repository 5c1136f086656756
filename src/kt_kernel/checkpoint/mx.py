"""MXFP8 and MXFP4 experts: e4m3 or e2m1 codes with ue8m0 scales per 32 columns.

OCP Microscaling Formats 1.0. DeepSeek-V4 stores MXFP4 as weight and scale, compressed-tensors as
weight_packed and weight_scale, gpt-oss in stacks (gpt_oss.py); the low nibble comes first in all.
"""

from __future__ import annotations

import torch

from ..methods import MXFP4, MXFP8, WeightForm
from ..quantised import QuantisedMatrix
from .fp8 import E4M3, scale_of
from .header import TensorInfo
from .layout import Parts
from .matrix import MatrixFormat, Shapes, bytes_of, two_dimensions
from .parts import UE8M0, Read, check_tensor, ue8m0_scales
from .quantization import Quantization

BLOCK = 32
NIBBLES = ("U8", "I8", "F4")


def codes_of(parts: Parts) -> TensorInfo:
    """The tensor of 4-bit codes."""
    return parts["weight_packed"] if "weight_packed" in parts else parts["weight"]


def check_nibbles(info: TensorInfo, rows: int, columns: int) -> None:
    """Bytes [N, K/2], or what safetensors calls F4, [N, K]."""
    check_tensor(info, NIBBLES, (rows, columns if info.dtype == "F4" else columns // 2))


def size_of_nibbles(info: TensorInfo) -> tuple[int, int]:
    rows, columns = two_dimensions(info)
    return rows, columns if info.dtype == "F4" else 2 * columns


class MxFp8(MatrixFormat):
    """weight e4m3 [N, K]; weight_scale_inv or weight_scale [N, K/32]."""

    title = "MXFP8"
    method = "MXFP8"
    quant_methods = ("mxfp8", "fp8", "compressed-tensors", "modelopt", "modelopt_mxfp8")

    @classmethod
    def size(cls, parts: Parts) -> tuple[int, int]:
        return two_dimensions(parts["weight"])

    @classmethod
    def layer_form(
        cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization
    ) -> WeightForm:
        return WeightForm(MXFP8)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        check_tensor(parts["weight"], E4M3, (rows, columns))
        check_tensor(scale_of(parts), UE8M0, (rows, columns // BLOCK))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = ue8m0_scales(info, read(info, None)).contiguous()
        return QuantisedMatrix(MXFP8, read(parts["weight"], None), scale)


class MxFp4(MatrixFormat):
    """weight or weight_packed [N, K/2] bytes; scale or weight_scale [N, K/32]."""

    title = "MXFP4"
    method = "MXFP4"
    quant_methods = ("mxfp4", "fp8", "compressed-tensors", "quark")

    @classmethod
    def size(cls, parts: Parts) -> tuple[int, int]:
        return size_of_nibbles(codes_of(parts))

    @classmethod
    def layer_form(
        cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization
    ) -> WeightForm:
        return WeightForm(MXFP4)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        check_nibbles(codes_of(parts), rows, columns)
        check_tensor(scale_of(parts), UE8M0, (rows, columns // BLOCK))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = ue8m0_scales(info, read(info, None)).contiguous()
        return QuantisedMatrix(MXFP4, bytes_of(read(codes_of(parts), None)), scale)


def stacked_matrix(blocks: torch.Tensor, scales: torch.Tensor, info: TensorInfo) -> QuantisedMatrix:
    """One matrix from gpt-oss's blocks uint8 [N, K/32, 16] and scales [N, K/32] (`info`'s)."""
    return QuantisedMatrix(
        MXFP4, blocks.flatten(1).contiguous(), ue8m0_scales(info, scales).contiguous()
    )
