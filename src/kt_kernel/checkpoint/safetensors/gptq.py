"""GPTQ experts, 4 bits.

qweight int32 [K/8, N], with the lowest column in the lowest bits; scales [K/g, N]; qzeros int32
[K/g, N/8], with the lowest row in the lowest bits. g_idx [K] is the group of each column, in any
order (desc_act); without it, each g consecutive columns are a group. W = (code - zero) * scale.
Format "gptq" (the default) stores zero - 1, "gptq_v2" stores zero (checkpoint_format in
config.json). sym: true in config.json means zero = 8 everywhere, whatever qzeros holds: quantisers
store 7 or 8 there, and the engines' kernels for symmetric weights do not read it.
"""

from __future__ import annotations

from ...weights.formats import INT4_GROUP, INT4_ZERO, WeightForm
from ...weights.quantised import QuantisedMatrix
from ..quantization import AUTO_ROUND, Quantization
from .groups import check_scale_type, grouped_form, in_groups, nibbles_in_order, order_of_groups
from .layout import Parts
from .matrix import MatrixFormat, Shapes, bytes_of, two_dimensions
from .parts import FLOATS, Read, check_tensor, nibbles, signed_scales


class Gptq(MatrixFormat):
    title = "GPTQ"
    tensors = (
        "`qweight` int32 [K/8, N]; `qzeros` int32 [K/g, N/8]; `scales` float [K/g, N]; may "
        "have `g_idx` [K], in any order; formats gptq and gptq_v2"
    )
    method = "GPTQ_INT4"
    quant_methods = ("gptq", *AUTO_ROUND)

    def __init__(self, form: WeightForm) -> None:
        super().__init__(form)
        self._first_zero = 1  # the zero point that a stored 0 means

    @classmethod
    def size(cls, parts: Parts) -> tuple[int, int]:
        words, rows = two_dimensions(parts["qweight"])
        return rows, 8 * words

    @classmethod
    def open(cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization) -> Gptq:
        opened = super().open(first, shapes, quantization)
        info = first["gate"]["qweight"]
        if not quantization.settings:
            raise ValueError(
                f"{info}: GPTQ experts need the quantization_config of the model's config.json:"
                " only its checkpoint_format determines how zero points are stored"
            )
        quantization.expect_value(info, ("checkpoint_format",), "gptq", "gptq_v2")
        if quantization.settings.get("checkpoint_format") == "gptq_v2":
            opened._first_zero = 0
        return opened

    @classmethod
    def layer_form(
        cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization
    ) -> WeightForm:
        info = first["gate"]["qweight"]
        quantization.expect_value(info, ("bits",), 4)
        quantization.expect_value(info, ("packing_format",), "auto_round:auto_gptq")
        symmetric = quantization.settings.get("sym") is True
        format = INT4_GROUP if symmetric else INT4_ZERO
        return grouped_form(format, first, "scales", 0, shapes)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        if rows % 8 or columns % 8:
            raise ValueError(
                f"{parts['qweight']}: {rows} rows and {columns} columns; GPTQ packs multiples of 8"
            )
        check_tensor(parts["qweight"], ("I32",), (columns // 8, rows))
        groups = columns // self.form.group_size
        scales = parts["scales"]
        check_tensor(scales, FLOATS, (groups, rows), (1, rows))
        check_scale_type(scales, self.form)
        check_tensor(parts["qzeros"], ("I32",), (scales.shape[0], rows // 8))
        if "g_idx" in parts:
            check_tensor(parts["g_idx"], ("I32", "I64"), (columns,))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = parts["scales"]
        scale = signed_scales(info, read(info, None)).T
        order = None
        if "g_idx" in parts:
            info = parts["g_idx"]
            order = order_of_groups(info, read(info, None), columns, scale.shape[1])
        count = columns // self.form.group_size
        codes = nibbles_in_order(bytes_of(read(parts["qweight"], None).T), order)
        if self.form.format == INT4_ZERO:
            zero = nibbles(read(parts["qzeros"], None), 1).T + self._first_zero
            scale, zero = in_groups(scale, count), in_groups(zero, count)
            return QuantisedMatrix(INT4_ZERO, codes, scale, zero, order=order)
        return QuantisedMatrix(INT4_GROUP, codes, in_groups(scale, count), order=order)
