"""The weight formats of the compiled core, by name, and the forms of matrices and layers.

A format is a row of kernels/include/kt/format.h. The core is loaded when a property of a format is
read, not when a format is named, because methods are named in processes that load no weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..runtime.variant import native

#: Types of group scales, in the order of their numbers (``ScaleType`` of kt/format.h).
SCALE_TYPE_NAMES = ("float16", "bfloat16", "float32")

BLOCK_SIZE = 128  # rows and columns that share a scale of kind "block"

_TILE_ROWS = 32
_ALIGNMENT = 64  # bytes, of tiles and of their heads


@dataclass(frozen=True)
class WeightFormat:
    """One weight format. Everything except its name comes from the compiled core.

    Attributes:
        name: its name in Python, such as "INT4_GROUP".
        id: its number, also in packed files.
        title: its name in messages.
        bits: bits of a code.
        scale_kind: "none", "row", "block" (128x128), "group", "ue8m0", "e4m3" or "ggml".
        scale_columns: columns per scale of "ue8m0" and "e4m3".
        zero_points: whether groups have zero points.
        file_bytes: bytes of a block in a GGUF file, of ggml's formats.
        block_columns: columns of a block; 0 if the block is the group.
        column_unit: K must be a multiple of it and, if there are groups, of the group size.
        from_dense: whether the core quantises dense weights to it.

    The other keys of a row of ``_C.weight_formats`` are attributes, too: they describe the packed
    layout (kernels/bind/formats.cpp).
    """

    name: str

    def __getattr__(self, attribute: str) -> Any:
        if not attribute.startswith("_"):  # Python's own attributes
            row = _rows().get(self.name)
            if row is None:
                known = ", ".join(_rows())
                raise ValueError(f"unknown weight format {self.name!r}; known: {known}")
            if attribute in row:
                self.__dict__.update(row)
                return row[attribute]
        raise AttributeError(f"weight formats have no attribute {attribute!r}")

    @property
    def grouped(self) -> bool:
        """Whether it has a scale per group. The group size belongs to the layer."""
        return self.scale_kind == "group"

    @property
    def ggml(self) -> bool:
        """Whether it keeps ggml's blocks."""
        return self.scale_kind == "ggml"


BF16 = WeightFormat("BF16")
INT8_ROW = WeightFormat("INT8_ROW")
INT4_ROW = WeightFormat("INT4_ROW")
INT4_GROUP = WeightFormat("INT4_GROUP")
INT4_ZERO = WeightFormat("INT4_ZERO")
FP8_BLOCK = WeightFormat("FP8_BLOCK")
FP8_ROW = WeightFormat("FP8_ROW")
MXFP8 = WeightFormat("MXFP8")
MXFP4 = WeightFormat("MXFP4")
NVFP4 = WeightFormat("NVFP4")
Q8_0 = WeightFormat("Q8_0")


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in native().weight_formats}


@functools.cache
def all_formats() -> tuple[WeightFormat, ...]:
    """All formats, in the order of their ids."""
    return tuple(map(WeightFormat, _rows()))


@functools.cache
def ggml_formats() -> tuple[WeightFormat, ...]:
    """The formats that keep ggml's blocks, by ggml's names."""
    return tuple(format for format in all_formats() if format.ggml)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class WeightForm:
    """How the weights of a matrix are stored, for the compiled core.

    Attributes:
        format: weight format.
        group_size: columns per scale of formats with groups, else 0.
        scale_type: for the same formats, the index in `SCALE_TYPE_NAMES`; else 0.
    """

    format: WeightFormat
    group_size: int = 0
    scale_type: int = 0

    @property
    def core(self) -> tuple[int, int, int]:
        """The arguments of the compiled core."""
        return self.format.id, self.group_size, self.scale_type

    @property
    def column_unit(self) -> int:
        """K must be a multiple of this."""
        return self.group_size or self.format.column_unit

    @property
    def block_columns(self) -> int:
        """Columns of a block of the packed layout, see kernels/include/kt/format.h."""
        return self.format.block_columns or self.group_size

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of the scales of such a block, for the rows of a tile."""
        scale = (4 if self.scale_type == 2 else 2) if self.format.grouped else 0
        return int(self.format.block_scale_bytes) + _TILE_ROWS * scale

    @property
    def block_bytes(self) -> int:
        """Bytes of such a block, for the rows of a tile."""
        return self.block_scale_bytes + _TILE_ROWS * self.block_columns * self.format.bits // 8

    def head_bytes(self, columns: int) -> int:
        """Bytes of the head of a tile."""
        if self.format.scale_kind != "block":
            return int(self.format.head_bytes)
        return _aligned(-(-columns // BLOCK_SIZE) * 4)

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a packed matrix [rows, columns] that is not divided over pools."""
        blocks = -(-columns // self.block_columns)
        return -(-rows // _TILE_ROWS) * _aligned(
            self.head_bytes(columns) + blocks * self.block_bytes
        )

    def __str__(self) -> str:
        if not self.format.grouped:
            return self.format.title
        scales = SCALE_TYPE_NAMES[self.scale_type]
        return f"{self.format.title} ({scales}, group size {self.group_size})"


@dataclass(frozen=True)
class LayerForm:
    """The forms of a layer's gate, up and down. All experts have the same."""

    gate: WeightForm
    up: WeightForm
    down: WeightForm

    @classmethod
    def same(cls, form: WeightForm) -> LayerForm:
        """The same form for all three."""
        return cls(form, form, form)

    def __iter__(self) -> Iterator[WeightForm]:
        """The forms of gate, up and down."""
        return iter((self.gate, self.up, self.down))

    @property
    def units(self) -> tuple[int, int]:
        """H and I must be multiples of these."""
        return math.lcm(self.gate.column_unit, self.up.column_unit), self.down.column_unit

    def __str__(self) -> str:
        if self.gate == self.up == self.down:
            return str(self.gate)
        return f"gate {self.gate}, up {self.up}, down {self.down}"
