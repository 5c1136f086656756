"""Integers of compressed-tensors, format pack-quantized, 4 or 8 bits (b).

weight_packed int32 [N, K b/32] or uint8 [N, K b/8], with the lowest column in the lowest bits;
weight_scale [N, K/g] or [N, 1]; weight_shape [2] holds N and K. Asymmetric weights have
weight_zero_point int32 [N b/32, K/g], packed along N. weight_g_idx [K] (actorder) is the group of
each column. W = (code - zero) * scale, with zero = 2^(b - 1) if there are no zero points, or if
config.json says that all weights are symmetric.
"""

from __future__ import annotations

import torch

from ...weights.formats import INT4_GROUP, INT4_ZERO, Q8_0, WeightForm
from ...weights.methods import MIXED
from ...weights.quantised import QuantisedMatrix
from ..quantization import Quantization
from .groups import (
    Groups,
    check_scale_type,
    groups_of,
    nibbles_in_order,
    order_of_groups,
    scale_type,
)
from .int8 import from_offset_bytes, refuse_order
from .layout import Parts
from .matrix import MatrixFormat, bits_of, bytes_of, two_dimensions
from .parts import FLOATS, Read, check_tensor, nibbles, signed_scales

_NO_GROUP = -1  # fills a weight_g_idx that was never set
# What compressed-tensors calls the formats of other tensors.
_OTHER_FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "marlin-24",
)


class PackQuantized(MatrixFormat):
    title = "packed integers of compressed-tensors"
    tensors = (
        "`weight_packed` int32 [N, K/8] or uint8 [N, K/2], twice as many with 8 bits; "
        "`weight_scale` float [N, K/g] or [N, 1]; may have `weight_zero_point` int32 [N/8, K/g] "
        "(4 bits only), `weight_g_idx` [K], `weight_shape`"
    )
    method = "RAWINT4"
    formats = (INT4_GROUP, INT4_ZERO, Q8_0)

    def __init__(self, form: WeightForm, bits: int, groups: Groups) -> None:
        super().__init__(form)
        self._bits, self._groups = bits, groups
        if bits == 8:
            self.method = MIXED

    @classmethod
    def rows(cls, parts: Parts) -> int:
        return two_dimensions(parts["weight_packed"])[0]

    @classmethod
    def open(
        cls, parts: Parts, rows: int, columns: int, quantization: Quantization
    ) -> PackQuantized:
        info, scales = parts["weight_packed"], parts["weight_scale"]
        if quantization.settings.get("format") in _OTHER_FORMATS:
            raise ValueError(
                f"{info} is {cls.title}, but {quantization.file} has format"
                f" {quantization.settings['format']!r}; expected 'pack-quantized' or"
                " 'mixed-precision'"
            )
        bits = bits_of(info, two_dimensions(info)[1], columns, (4, 8))
        weights = list(quantization.weight_groups())
        given = [group.get("num_bits") for group in weights]
        if given and bits not in given:
            raise ValueError(
                f"{info} has {bits} bits per weight, but {quantization.file} has num_bits"
                f" {given[0]!r}; accepted: {bits}"
            )
        symmetric = bool(weights) and all(group.get("symmetric") is True for group in weights)
        zero = "weight_zero_point" in parts and not symmetric
        if not zero and weights and all(group.get("symmetric") is False for group in weights):
            raise ValueError(
                f"{info} has no weight_zero_point beside it, but {quantization.file} has symmetric"
                " false; accepted: both or neither"
            )
        if bits == 8 and zero:
            raise ValueError(
                f"{parts['weight_zero_point']}: 8-bit weights with zero points are not supported;"
                " accepted: symmetric ones"
            )
        groups = groups_of(
            scales, columns, two_dimensions(scales)[1], quantization.group_sizes(info)
        )
        form = WeightForm(Q8_0)
        if bits == 4:
            format = INT4_ZERO if zero else INT4_GROUP
            form = WeightForm(format, groups.unit, scale_type(scales))
        opened = cls(form, bits, groups)
        opened.ordered = "weight_g_idx" in parts and groups.count > 1
        return opened

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        packed, scale = parts["weight_packed"], parts["weight_scale"]
        codes = (8 if packed.dtype == "U8" else 32) // self._bits  # in an element
        check_tensor(packed, ("I32", "U8"), (rows, columns // codes))
        check_tensor(scale, FLOATS, (rows, self._groups.count))
        check_scale_type(scale, self.form)
        if self.form.format == INT4_ZERO:
            shape = (-(-rows * self._bits // 32), self._groups.count)
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
                order = order_of_groups(info, group, self._groups)
        packed = bytes_of(read(parts["weight_packed"], None))
        if self._bits == 8:
            refuse_order(info, order)
            return from_offset_bytes(parts["weight_scale"], packed, scale, self._groups)
        zero: torch.Tensor | None = None
        if self.form.format == INT4_ZERO:
            zero = nibbles(read(parts["weight_zero_point"], None), 0)[:rows]
            zero = self._groups.spread(zero)
        codes = nibbles_in_order(packed, order)
        scale = self._groups.spread(scale)
        return QuantisedMatrix(self.form.format, codes, scale, zero, order=order)
