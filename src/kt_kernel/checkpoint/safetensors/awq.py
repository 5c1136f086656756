"""AWQ experts, 4 bits, version "gemm".

qweight int32 [K, N/8] and qzeros int32 [K/g, N/8] hold rows 0, 2, 4, 6, 1, 3, 5, 7 of each eight,
the first in the lowest bits. scales [K/g, N]. W = (code - zero) * scale.
"""

from __future__ import annotations

from ...weights.formats import INT4_ZERO, WeightForm
from ...weights.quantised import QuantisedMatrix
from ..quantization import AUTO_ROUND, Quantization
from .groups import check_scale_type, grouped_form, in_groups
from .layout import Parts
from .matrix import MatrixFormat, Shapes, two_dimensions
from .parts import FLOATS, Read, check_tensor, nibbles, signed_scales

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq(MatrixFormat):
    title = "AWQ"
    tensors = (
        "`qweight` int32 [K, N/8]; `qzeros` int32 [K/g, N/8]; `scales` float [K/g, N]; version gemm"
    )
    method = "AWQ_INT4"
    quant_methods = ("awq", *AUTO_ROUND)

    @classmethod
    def size(cls, parts: Parts) -> tuple[int, int]:
        columns, words = two_dimensions(parts["qweight"])
        return 8 * words, columns

    @classmethod
    def layer_form(
        cls, first: dict[str, Parts], shapes: Shapes, quantization: Quantization
    ) -> WeightForm:
        info = first["gate"]["qweight"]
        quantization.expect_value(info, ("bits", "w_bit"), 4)
        quantization.expect_value(info, ("packing_format",), "auto_round:auto_awq")
        version = quantization.settings.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise ValueError(
                f"{info}: {quantization.file} has AWQ version {version!r}; accepted: 'gemm'"
            )
        return grouped_form(INT4_ZERO, first, "scales", 0, shapes)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        if rows % 8:
            raise ValueError(f"{parts['qweight']}: {rows} rows; AWQ packs multiples of 8")
        check_tensor(parts["qweight"], ("I32",), (columns, rows // 8))
        groups = columns // self.form.group_size
        scales = parts["scales"]
        check_tensor(scales, FLOATS, (groups, rows), (1, rows))
        check_scale_type(scales, self.form)
        check_tensor(parts["qzeros"], ("I32",), (scales.shape[0], rows // 8))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = parts["scales"]
        scale = signed_scales(info, read(info, None)).T
        zero = nibbles(read(parts["qzeros"], None), 1, _ORDER).T
        codes = nibbles(read(parts["qweight"], None), 1, _ORDER).T
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        count = columns // self.form.group_size
        return QuantisedMatrix(
            INT4_ZERO, packed.contiguous(), in_groups(scale, count), in_groups(zero, count)
        )
