"""INT4 experts of compressed-tensors, format pack-quantized (method RAWINT4).

weight_packed int32 [N, K/8] or uint8 [N, K/2], with the lowest column in the lowest bits;
weight_scale [N, K/g] or [N, 1]; weight_shape [2] holds N and K. Asymmetric weights have
weight_zero_point int32 [N/8, K/g], packed along N. weight_g_idx [K] (actorder) is the group of each
column. W = (code - zero) * scale, with zero = 8 if there are no zero points.
"""

from __future__ import annotations

import torch

from ...weights.formats import INT4_GROUP, INT4_ZERO, WeightForm
from ...weights.quantised import QuantisedMatrix
from ..quantization import Quantization
from .groups import check_scale_type, grouped_form, in_groups, nibbles_in_order, order_of_groups
from .layout import Parts
from .matrix import MatrixFormat, Shapes, bytes_of, two_dimensions
from .parts import FLOATS, Read, check_tensor, nibbles, signed_scales

_BITS = 4
_NO_GROUP = -1  # fills a weight_g_idx that was never set


class PackedInt4(MatrixFormat):
    title = "4-bit integers of compressed-tensors"
    tensors = (
        "`weight_packed` int32 [N, K/8] or uint8 [N, K/2]; `weight_scale` float [N, K/g] or "
        "[N, 1]; may have `weight_zero_point` int32 [N/8, K/g], `weight_g_idx` [K], "
        "`weight_shape`"
    )
    method = "RAWINT4"
    quant_methods = ("compressed-tensors",)

    @classmethod
    def size(cls, parts: Parts) -> tuple[int, int]:
        info = parts["weight_packed"]
        rows, columns = two_dimensions(info)
        return rows, columns * (2 if info.dtype == "U8" else 8)

    @classmethod
    def layer_form(
        cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization
    ) -> WeightForm:
        info = first["gate"]["weight_packed"]
        quantization.expect_value(info, ("format",), "pack-quantized", "mixed-precision")
        bits = [group.get("num_bits") for group in quantization.weight_groups()]
        if bits and _BITS not in bits:
            raise ValueError(
                f"{info}: {quantization.file} has num_bits {bits[0]!r}; accepted: {_BITS}"
            )
        format = INT4_ZERO if "weight_zero_point" in first["gate"] else INT4_GROUP
        return grouped_form(format, first, "weight_scale", 1, shapes)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        packed, scale = parts["weight_packed"], parts["weight_scale"]
        width = 2 if packed.dtype == "U8" else 8
        check_tensor(packed, ("I32", "U8"), (rows, columns // width))
        groups = columns // self.form.group_size
        check_tensor(scale, FLOATS, (rows, groups), (rows, 1))
        check_scale_type(scale, self.form)
        if "weight_zero_point" in parts:
            shape = (-(-rows // 8), scale.shape[1])
            check_tensor(parts["weight_zero_point"], ("I32",), shape)
        if "weight_shape" in parts:
            check_tensor(parts["weight_shape"], ("I64", "I32"), (2,))
        if "weight_g_idx" in parts:
            check_tensor(parts["weight_g_idx"], ("I32", "I64"), (columns,))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        if "weight_shape" in parts:
            info = parts["weight_shape"]
            shape = read(info, None).tolist()
            if shape != [rows, columns]:
                raise ValueError(f"{info} is {shape}; expected {[rows, columns]}")
        info = parts["weight_scale"]
        scale = signed_scales(info, read(info, None))
        order: torch.Tensor | None = None
        if "weight_g_idx" in parts:
            info = parts["weight_g_idx"]
            group = read(info, None)
            if not bool((group == _NO_GROUP).all()):
                order = order_of_groups(info, group, columns, scale.shape[1])
        count = columns // self.form.group_size
        zero: torch.Tensor | None = None
        if "weight_zero_point" in parts:
            zero = nibbles(read(parts["weight_zero_point"], None), 0)[:rows]
            zero = in_groups(zero, count)
        codes = nibbles_in_order(bytes_of(read(parts["weight_packed"], None)), order)
        scale = in_groups(scale, count)
        return QuantisedMatrix(self.form.format, codes, scale, zero, order=order)
