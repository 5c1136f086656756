"""GPTQ experts, 4 or 8 bits (b).

qweight int32 [K b/32, N], with the lowest column in the lowest bits; scales [K/g, N]; qzeros int32
[K/g, N b/32], with the lowest row in the lowest bits. g_idx [K] is the group of each column, in any
order (desc_act); without it, each g consecutive columns are a group. W = (code - zero) * scale.
Format "gptq" (the default) stores zero - 1; "gptq_v2" (checkpoint_format in config.json) and two of
AutoRound's packings store zero. sym: true in config.json means zero = 2^(b - 1) everywhere,
whatever qzeros holds: quantisers store that number or one less, and the engines' kernels for
symmetric weights ignore it.
"""

from __future__ import annotations

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

# AutoRound's names of packings that store the zero point itself (auto_round/inference/backend.py).
_UNCHANGED_ZEROS = ("auto_round", "auto_round:gptqmodel")


class Gptq(MatrixFormat):
    title = "GPTQ"
    tensors = (
        "`qweight` int32 [K/8, N], or [K/4, N] with 8 bits; `qzeros` int32 [K/g, N/8]; `scales` "
        "float [K/g, N]; may have `g_idx` [K], in any order; formats gptq and gptq_v2. 8 bits: "
        "symmetric ones"
    )
    method = "GPTQ_INT4"
    formats = (INT4_GROUP, INT4_ZERO, Q8_0)

    def __init__(self, form: WeightForm, bits: int, groups: Groups, first_zero: int) -> None:
        super().__init__(form)
        self._bits, self._groups = bits, groups
        self._first_zero = first_zero  # the zero point that a stored 0 means
        if bits == 8:
            self.method = MIXED

    @classmethod
    def rows(cls, parts: Parts) -> int:
        return two_dimensions(parts["qweight"])[1]

    @classmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> Gptq:
        info, scales = parts["qweight"], parts["scales"]
        if not quantization.settings:
            raise ValueError(
                f"{info}: GPTQ experts need the quantization_config of the model's config.json:"
                " only its checkpoint_format determines how zero points are stored"
            )
        quantization.expect_value(info, ("checkpoint_format",), "gptq", "gptq_v2")
        bits = bits_of(info, two_dimensions(info)[0], columns, (4, 8))
        quantization.expect_value(info, ("bits",), bits)
        settings = quantization.of(info)
        symmetric = settings.get("sym") is True
        if bits == 8 and not symmetric:
            raise ValueError(
                f"{info} has 8 bits, and {quantization.file} does not have sym: true; accepted with"
                " 8 bits: symmetric weights"
            )
        count = two_dimensions(scales)[0]
        groups = groups_of(scales, columns, count, quantization.group_sizes(info))
        form = WeightForm(Q8_0)
        if bits == 4:
            format = INT4_GROUP if symmetric else INT4_ZERO
            form = WeightForm(format, groups.unit, scale_type(scales))
        if not symmetric:
            packings = ("auto_round:auto_gptq", *_UNCHANGED_ZEROS)
            quantization.expect_value(info, ("packing_format",), *packings)
        unchanged = (
            settings.get("checkpoint_format") == "gptq_v2"
            or settings.get("packing_format") in _UNCHANGED_ZEROS
        )
        opened = cls(form, bits, groups, 0 if unchanged else 1)
        # The files have g_idx in any case, and one group per row has no order.
        opened.ordered = bool(settings.get("desc_act")) and "g_idx" in parts and groups.count > 1
        return opened

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        codes = 32 // self._bits  # in a word
        if rows % codes or columns % codes:
            raise ValueError(
                f"{parts['qweight']}: {rows} rows and {columns} columns; GPTQ packs multiples of"
                f" {codes}"
            )
        check_tensor(parts["qweight"], ("I32",), (columns // codes, rows))
        check_tensor(parts["scales"], FLOATS, (self._groups.count, rows))
        check_scale_type(parts["scales"], self.form)
        check_tensor(parts["qzeros"], ("I32",), (self._groups.count, rows // codes))
        if "g_idx" in parts:
            check_tensor(parts["g_idx"], ("I32", "I64"), (columns,))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = parts["scales"]
        scale = signed_scales(info, read(info, None)).T
        order = None
        if "g_idx" in parts:
            info = parts["g_idx"]
            order = order_of_groups(info, read(info, None), self._groups)
        packed = bytes_of(read(parts["qweight"], None).T)
        if self._bits == 8:
            refuse_order(info, order)
            return from_offset_bytes(parts["scales"], packed, scale, self._groups)
        codes, scale = nibbles_in_order(packed, order), self._groups.spread(scale)
        if self.form.format == INT4_GROUP:
            return QuantisedMatrix(INT4_GROUP, codes, scale, order=order)
        zero = nibbles(read(parts["qzeros"], None), 1).T + self._first_zero
        return QuantisedMatrix(INT4_ZERO, codes, scale, self._groups.spread(zero), order=order)
