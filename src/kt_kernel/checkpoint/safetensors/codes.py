"""The base of formats whose form is the same in every layer: where their codes are."""

from __future__ import annotations

from typing import ClassVar, Self

import torch

from ...weights.formats import WeightForm, WeightFormat
from ..header import TensorInfo
from ..quantization import Quantization
from .layout import Parts
from .matrix import MatrixFormat, bytes_of, two_dimensions
from .parts import Read, check_tensor

E4M3 = ("F8_E4M3",)
NIBBLES = ("U8", "I8", "F4")
SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")


def scale_of(parts: Parts) -> TensorInfo:
    """The tensor that holds the scales of the codes."""
    return next(parts[name] for name in SCALE_NAMES if name in parts)


class FixedForm(MatrixFormat):
    """Weights with the same form in every layer."""

    formats: ClassVar[tuple[WeightFormat]]
    stacked = True

    @classmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> Self:
        form = WeightForm(cls.formats[0])
        if columns % form.column_unit:
            raise ValueError(
                f"{next(iter(parts.values()))}: {columns} columns; {cls.title} needs multiples of"
                f" {form.column_unit}"
            )
        return cls(form)


class E4m3Codes(FixedForm):
    """weight e4m3 [N, K]."""

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        check_tensor(parts["weight"], E4M3, (rows, columns))

    def read_codes(self, parts: Parts, read: Read) -> torch.Tensor:
        return read(parts["weight"], None)


class E2m1Codes(FixedForm):
    """weight or weight_packed: bytes [N, K/2], the low nibble first; or dtype F4 of safetensors,
    [N, K]."""

    @classmethod
    def rows(cls, parts: Parts) -> int:
        return two_dimensions(_e2m1_tensor(parts))[0]

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        info = _e2m1_tensor(parts)
        check_tensor(info, NIBBLES, (rows, columns if info.dtype == "F4" else columns // 2))

    def read_codes(self, parts: Parts, read: Read) -> torch.Tensor:
        return bytes_of(read(_e2m1_tensor(parts), None))


def _e2m1_tensor(parts: Parts) -> TensorInfo:
    return parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
