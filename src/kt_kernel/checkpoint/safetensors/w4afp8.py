"""W4AFP8: signed 4-bit integers with scales per group, for activations in FP8.

TensorRT-LLM's script for DeepSeek-V3 writes it, SGLang serves it as "w4afp8" (all else is in FP8).
weight int8 [N, K/2] holds two codes in two's complement, the lower column in the low nibble;
weight_scale_inv float [N, K/g], g usually 128. W = code * scale. The scales of activations
(input_scale) are not used: the kernels take activations in 16 bits.
"""

from __future__ import annotations

from ...weights.formats import INT4_GROUP, WeightForm
from ...weights.quantised import QuantisedMatrix
from ..quantization import Quantization
from .codes import scale_of
from .groups import Groups, check_scale_type, groups_of, scale_type
from .layout import Parts
from .matrix import MatrixFormat, bytes_of, two_dimensions
from .parts import FLOATS, Read, check_tensor, signed_scales

_OFFSETS = 0x88  # what turns both nibbles n of a byte into n + 8, as the core stores them


class W4AFp8(MatrixFormat):
    """weight int8 [N, K/2]; weight_scale_inv [N, K/g]."""

    title = "W4AFP8"
    tensors = (
        "`weight` int8 [N, K/2], two signed codes in a byte; `weight_scale_inv` or `weight_scale`,"
        " float, [N, K/g]"
    )
    method = "RAWINT4"
    formats = (INT4_GROUP,)

    def __init__(self, form: WeightForm, groups: Groups) -> None:
        super().__init__(form)
        self._groups = groups

    @classmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> W4AFp8:
        info = scale_of(parts)
        count = two_dimensions(info)[1]
        groups = groups_of(info, columns, count, quantization.group_sizes(info))
        return cls(WeightForm(INT4_GROUP, groups.unit, scale_type(info)), groups)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        check_tensor(parts["weight"], ("I8",), (rows, columns // 2))
        check_tensor(scale_of(parts), FLOATS, (rows, self._groups.count))
        check_scale_type(scale_of(parts), self.form)

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> QuantisedMatrix:
        info = scale_of(parts)
        scale = self._groups.spread(signed_scales(info, read(info, None)))
        codes = bytes_of(read(parts["weight"], None)) ^ _OFFSETS
        return QuantisedMatrix(INT4_GROUP, codes, scale)
