"""Experts that kt-kernel's converter wrote, int8 or int4, split over n NUMA nodes.

    blk.{L}.ffn_{gate,up,down}_exps.{e}.numa.{p}.weight   int8 [bytes], in the order of tiles.py
    blk.{L}.ffn_{gate,up,down}_exps.{e}.numa.{p}.scale    float32 [rows]

Part p of n holds the p-th of n equal shares of the rows of gate and up, and of the columns of down.
Each part is quantised by itself, so down has one scale per row and part.

- int4 with several parts: down becomes INT4_GROUP with each scale repeated for its groups. This is
  exact.
- int8 with several parts: each row of down gets the largest scale of its parts, and the codes of
  the other parts are rounded to it. The error is at most half a step of that scale.

`*_bwd_exps`, transposed copies for fine-tuning, are ignored. Nothing states whether codes have 8 or
4 bits, not even the config.json that the converter copies, so the sizes decide.

kt-kernel's MOE_INT8 and MOE_INT4, which its x86 wheel lacks, write other byte orders under the same
names. They cannot be told apart.

Before the merge, the same bytes are in one file per tensor (folder.py). They get the same names
here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...weights.expert_tensors import MATRICES, Matrix
from ...weights.formats import INT4_GROUP, INT4_ROW, INT8_ROW, LayerForm, WeightForm
from ...weights.methods import get_method
from ...weights.quantised import SCALE_TYPES, QuantisedMatrix
from ..base import Checkpoint, Sizes
from ..header import TensorInfo
from ..index import Index
from ..open_files import Piece, Pieces
from ..reader import LayerReader, in_words
from ..safetensors.families import model_type
from ..safetensors.files import Files
from ..safetensors.parts import Read, check_tensor, float_scales
from ..stored import Stored
from .tiles import COLUMN_UNIT, row_major

# Experts with such names were packed by a program; Hugging Face's models use other names.
_EXPERTS = re.compile(r"blk\.([0-9]{1,9})\.ffn_(gate|up|down|gate_up)(_bwd)?_exps\.(.*)", re.DOTALL)
_TENSOR = re.compile(r"(0|[1-9][0-9]{0,8})\.numa\.(0|[1-9][0-9]{0,8})\.(weight|scale)")
_UNPACKED = re.compile(r"(?:.+\.)?experts\.[0-9]+\.")
_KINDS = ("weight", "scale")
# INT4 rows whose columns come in parts: each group has the scale of its part.
_PARTED_INT4 = WeightForm(INT4_GROUP, COLUMN_UNIT[4], SCALE_TYPES[torch.float32])
#: Methods that accept the weights, by bits per code.
METHODS: dict[int, tuple[str, ...]] = {8: ("AMXINT8", "MOE_INT8"), 4: ("AMXINT4", "MOE_INT4")}

# (expert, matrix, part, "weight" or "scale") to tensor.
Members = dict[tuple[int, str, int, str], TensorInfo]


def find_packed(tensors: dict[str, TensorInfo]) -> TensorInfo | None:
    """A tensor named blk.{L}.ffn_*_exps.*, or None."""
    return next((info for name, info in tensors.items() if _EXPERTS.match(name)), None)


class KtPackedCheckpoint(Checkpoint):
    """A directory that kt-kernel converted."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._members: dict[int, Members] = {}
        for name, info in index.tensors.items():
            self._add(name, info)

    def _add(self, name: str, info: TensorInfo) -> None:
        match = _EXPERTS.match(name)
        if match is None:
            if _UNPACKED.match(name):
                packed = find_packed(self._index.tensors)
                raise ValueError(
                    f"{info}: unpacked experts together with packed ones ({packed}); expected only"
                    " one kind"
                )
            return
        if match[3]:
            return
        found = _TENSOR.fullmatch(match[4]) if match[2] in MATRICES else None
        if found is None:
            kind = "are named as in GGUF" if match[4] == "weight" else "have an unknown packing"
            raise ValueError(
                f"{info}: experts {kind}; accepted: the original checkpoint, or kt-kernel's int8"
                f" and int4: blk.{match[1]}.ffn_<gate, up, down>_exps.<expert>.numa.<part>.<weight,"
                " scale>"
            )
        self._index.need([info])
        key = (int(found[1]), match[2], int(found[2]), found[3])
        self._members.setdefault(int(match[1]), {})[key] = info

    @property
    def model_type(self) -> str | None:
        return model_type(self._index.config)

    def layers(self) -> list[int]:
        return sorted(self._members)

    def where(self, layer_idx: int) -> str:
        self._layer(layer_idx)
        return f"blk.{layer_idx}."

    def sizes(self, layer_idx: int) -> Sizes:
        return self._layer(layer_idx).sizes

    def stored(self, layer_idx: int) -> Stored:
        bits = self._layer(layer_idx).bits
        return Stored(f"kt-kernel's int{bits}", METHODS[bits][0])

    def _read_tensor(self, info: TensorInfo) -> torch.Tensor:
        with Files(self._index) as files:
            return files.read(info, None)

    def raw_parts(self, layer_idx: int, matrix: str, kind: str) -> list[list[torch.Tensor]]:
        """A layer's stored tensors: for each part, one per expert. kind: "weight" or "scale"."""
        layer = self._layer(layer_idx)
        with Files(self._index) as files:
            return [
                [files.read(layer.members[e, matrix, p, kind], None) for e in range(layer.sizes[0])]
                for p in range(layer.parts)
            ]

    @contextmanager
    def _open_layer(
        self, layer_idx: int, sizes: Sizes, method: str | None
    ) -> Iterator[tuple[LayerReader, Pieces]]:
        layer = self._layer(layer_idx)
        if layer.sizes != sizes:
            raise ValueError(
                f"{self.path}: layer {layer_idx} has {in_words(layer.sizes)};"
                f" expected {in_words(sizes)}"
            )
        some = next(iter(layer.members.values()))
        accepted = METHODS[layer.bits]
        if method is not None and get_method(method).name not in accepted:
            raise ValueError(
                f"{some}: the experts are kt-kernel's int{layer.bits}, which method"
                f" {' or '.join(accepted)} reads; method {method} was requested"
            )
        with Files(self._index) as files:
            reader = LayerReader(MATRICES, layer.form, lambda e: layer.read(e, files.read))
            yield reader, Pieces(files, layer.pieces)

    def _layer(self, layer_idx: int) -> SplitLayer:
        members = self._members.get(layer_idx)
        if not members:
            raise self._no_experts(layer_idx)
        return open_split(self.path, layer_idx, members)


@dataclass(frozen=True)
class SplitLayer:
    """A checked layer. parts: the number of NUMA nodes that the weights are split over."""

    members: Members
    sizes: Sizes
    parts: int
    bits: int

    @property
    def form(self) -> LayerForm:
        row = WeightForm(INT8_ROW if self.bits == 8 else INT4_ROW)
        return LayerForm(row, row, _PARTED_INT4 if self._grouped_down else row)

    @property
    def _grouped_down(self) -> bool:
        return self.bits == 4 and self.parts > 1

    def pieces(self, expert: int) -> Iterator[Piece]:
        """Where the files have an expert."""
        for matrix, part, kind in itertools.product(MATRICES, range(self.parts), _KINDS):
            yield self.members[expert, matrix, part, kind], 0, 1

    def read(self, expert: int, read: Read) -> dict[str, Matrix]:
        """Reads gate, up and down of an expert. Raises ValueError for a scale that is negative or
        not finite."""
        _, hidden, inter = self.sizes
        share = inter // self.parts
        result: dict[str, Matrix] = {}
        for matrix in MATRICES:
            down = matrix == "down"
            codes, scales = [], []
            for part in range(self.parts):
                weight, scale = (self.members[expert, matrix, part, kind] for kind in _KINDS)
                shape = (hidden, share) if down else (share, hidden)
                codes.append(row_major(read(weight, None), self.bits, *shape))
                value = float_scales(scale, read(scale, None))
                scales.append(value if self.bits == 8 else value * 16)
            if not down or self.parts == 1:
                row = self.form.gate.format
                result[matrix] = QuantisedMatrix(row, torch.cat(codes), torch.cat(scales))
            elif self._grouped_down:
                result[matrix] = grouped(codes, scales)
            else:
                result[matrix] = with_common_scale(codes, scales)
        return result


def grouped(codes: list[torch.Tensor], scales: list[torch.Tensor]) -> QuantisedMatrix:
    """Joins INT4 columns in parts, [N, bytes] with scales [N] each, into one matrix with groups."""
    groups = codes[0].shape[1] * 2 // _PARTED_INT4.group_size
    scale = torch.stack(scales, 1).repeat_interleave(groups, 1)
    return QuantisedMatrix(_PARTED_INT4.format, torch.cat(codes, 1), scale)


def with_common_scale(codes: list[torch.Tensor], scales: list[torch.Tensor]) -> QuantisedMatrix:
    """Joins int8 columns in parts, [N, K] with scales [N] each, into one matrix with row scales."""
    scale = torch.stack(scales).amax(0)
    divisor = torch.where(scale == 0, 1, scale)
    rounded = [
        (part * (own / divisor)[:, None]).round().to(torch.int8)
        for part, own in zip(codes, scales, strict=True)
    ]
    return QuantisedMatrix(INT8_ROW, torch.cat(rounded, 1), scale)


def open_split(path: str, layer_idx: int, members: Members) -> SplitLayer:
    """Checks that a layer's tensors are complete and of matching sizes.

    Raises ValueError naming file and tensor.
    """
    last, last_part = max(members), max(members, key=lambda key: key[2])
    experts, parts = 1 + last[0], 1 + last_part[2]
    for key, count in ((last, experts), (last_part, parts)):
        if count > len(members):  # before a loop as long as the number
            raise ValueError(
                f"{members[key]}: the layer's {len(members)} tensors are too few for this number"
            )
    for expert in range(experts):
        for matrix in MATRICES:
            for part in range(parts):
                for kind in _KINDS:
                    if (expert, matrix, part, kind) not in members:
                        name = f"blk.{layer_idx}.ffn_{matrix}_exps.{expert}.numa.{part}.{kind}"
                        raise ValueError(
                            f"{path}: tensor {name!r} is missing; the layer has experts 0 to"
                            f" {experts - 1} in {parts} parts, such as"
                            f" {members[last].name!r}"
                        )
    weight, scale, other = (
        members[0, matrix, 0, kind]
        for matrix, kind in (("gate", "weight"), ("gate", "scale"), ("down", "scale"))
    )
    for info in (weight, scale, other):
        if len(info.shape) != 1 or not info.shape[0]:
            raise ValueError(f"{info} has shape {list(info.shape)}, expected one dimension")
    rows, hidden = scale.shape[0], other.shape[0]
    bits = next((b for b in (8, 4) if weight.shape[0] * 8 == rows * hidden * b), None)
    if bits is None:
        raise ValueError(
            f"{weight}: {weight.shape[0]} bytes are neither int8 nor int4 with the {rows} rows of"
            f" {scale.name!r} and the {hidden} columns according to {other.name!r}"
        )
    unit = COLUMN_UNIT[bits]
    for info, size in ((scale, rows), (other, hidden)):
        if size % unit:
            raise ValueError(f"{info}: {size} rows; accepted: multiples of {unit} in int{bits}")
    for (_, matrix, _, kind), info in members.items():
        if kind == "scale":
            check_tensor(info, ("F32",), (hidden if matrix == "down" else rows,))
        else:
            check_tensor(info, ("I8", "U8"), (rows * hidden * bits // 8,))
    return SplitLayer(members, (experts, hidden, rows * parts), parts, bits)
