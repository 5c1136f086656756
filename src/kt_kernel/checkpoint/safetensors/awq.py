"""AWQ experts, 4 bits, version "gemm".

qweight int32 [K, N/8] and qzeros int32 [K/g, N/8] hold rows 0, 2, 4, 6, 1, 3, 5, 7 of each eight,
the first in the lowest bits. scales [K/g, N]. W = (code - zero) * scale. sym: true in config.json,
which AutoRound writes, means zero = 8 everywhere, as in GPTQ.
"""

from __future__ import annotations

from ...weights.formats import INT4_GROUP, INT4_ZERO, WeightForm
from ...weights.quantised import QuantisedMatrix
from ..quantization import Quantization
from .groups import Groups, check_scale_type, groups_of, scale_type
from .layout import Parts
from .matrix import MatrixFormat, bits_of, two_dimensions
from .parts import FLOATS, Read, check_tensor, nibbles, signed_scales

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq(MatrixFormat):
    title = "AWQ"
    tensors = (
        "`qweight` int32 [K, N/8]; `qzeros` int32 [K/g, N/8]; `scales` float [K/g, N]; version gemm"
    )
    method = "AWQ_INT4"
    formats = (INT4_GROUP, INT4_ZERO)

    def __init__(self, form: WeightForm, groups: Groups) -> None:
        super().__init__(form)
        self._groups = groups

    @classmethod
    def rows(cls, parts: Parts) -> int:
        return two_dimensions(parts["scales"])[1]

    @classmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> Awq:
        info, scales = parts["qweight"], parts["scales"]
        bits = bits_of(info, two_dimensions(info)[1], rows, (4,))
        quantization.expect_value(info, ("bits", "w_bit"), bits)
        version = quantization.settings.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise ValueError(
                f"{info}: {quantization.file} has AWQ version {version!r}; accepted: 'gemm'"
            )
        count = two_dimensions(scales)[0]
        groups = groups_of(scales, columns, count, quantization.group_sizes(info))
        format = INT4_GROUP if quantization.of(info).get("sym") is True else INT4_ZERO
        return cls(WeightForm(format, groups.unit, scale_type(scales)), groups)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        if rows % 8:
            raise ValueError(f"{parts['qweight']}: {rows} rows; AWQ packs multiples of 8")
        check_tensor(parts["qweight"], ("I32",), (columns, rows // 8))
        check_tensor(parts["scales"], FLOATS, (self._groups.count, rows))
        check_scale_type(parts["scales"], self.form)
        check_tensor(parts["qzeros"], ("I32",), (self._groups.count, rows // 8))

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = parts["scales"]
        scale = self._groups.spread(signed_scales(info, read(info, None)).T)
        codes = nibbles(read(parts["qweight"], None), 1, _ORDER).T
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
        if self.form.format == INT4_GROUP:
            return QuantisedMatrix(INT4_GROUP, packed, scale)
        zero = nibbles(read(parts["qzeros"], None), 1, _ORDER).T
        return QuantisedMatrix(INT4_ZERO, packed, scale, self._groups.spread(zero))
