"""Presents quantised stacks as tensors of single experts, so that each format has one reader.

Names show where the scales of a stack are (layout.py). Shapes show what they are for:
- per block (transformers' fine-grained FP8): [E, 2 ceil(I/128), ceil(H/128)], the first half for
  gate, and [E, ceil(H/128), ceil(I/128)]
- per row (compressed-tensors): [E, 2I, 1] and [E, H, 1]
- per 32 (MXFP4, MXFP8) or 16 columns (ModelOpt's NVFP4): [E, 2I, H/g] and [E, H, I/g]
- one number for all experts, one per expert, or two per expert, for gate and up
If the weights are transposed, scales with two dimensions are transposed, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...weights.expert_tensors import MATRICES
from ...weights.formats import BLOCK_SIZE
from ..header import TensorInfo
from .arrangement import codes_per_element, halves, infer_arrangement, stacked_shapes
from .families import Stacked
from .layout import Parts, PerExpert, StackedExperts
from .parts import Read


@dataclass(frozen=True, slots=True)
class Part(TensorInfo):
    """The part of a stacked tensor that belongs to one expert's matrix. The shape is that of the
    part; name and file are those of the whole tensor.

    expert: its number, or None if all experts share the tensor. half: 0 for gate and 1 for up, if
    the tensor holds both.
    """

    whole: TensorInfo
    expert: int | None
    transposed: bool = False
    half: int | None = None
    interleaved: bool = False

    @classmethod
    def of(
        cls,
        whole: TensorInfo,
        shape: tuple[int, ...],
        expert: int | None,
        transposed: bool = False,
        half: int | None = None,
        interleaved: bool = False,
    ) -> Part:
        return cls(
            whole.name,
            whole.file,
            whole.dtype,
            shape,
            whole.begin,
            whole.end,
            whole,
            expert,
            transposed,
            half,
            interleaved,
        )

    def read(self, read: Read) -> torch.Tensor:
        """Reads the part. Copies it if the rows of gate and up are not contiguous in the stack."""
        tensor = read(self.whole, self.expert)
        if self.transposed:
            tensor = tensor.T
        if self.half is not None:
            tensor = halves(tensor, self.interleaved)[self.half]
        return tensor.reshape(self.shape).contiguous()


def part_reader(read: Read) -> Read:
    """Extends `read` to parts. Keeps the tensors of the last expert, because gate and up are parts
    of the same ones."""
    kept: dict[str, torch.Tensor] = {}
    last: int | None = None

    def read_once(info: TensorInfo, expert: int | None) -> torch.Tensor:
        nonlocal last
        if expert is None:
            return read(info, None)
        if expert != last:
            kept.clear()
            last = expert
        if info.name not in kept:
            kept[info.name] = read(info, expert)
        return kept[info.name]

    return lambda info, first: info.read(read_once) if isinstance(info, Part) else read(info, first)


def single_experts(layout: StackedExperts, sizes: tuple[int, int, int] | None = None) -> PerExpert:
    """The layout with each tensor of an expert replaced by a part of a stack.

    sizes: the expected num_experts, hidden_size and moe_intermediate_size; None accepts any.

    Raises ValueError naming file and tensor for weights of another shape or unknown scales.
    """
    arrangement, found = infer_arrangement(layout)
    if sizes is not None and found != sizes:
        _explain_sizes(layout, arrangement, sizes)
    fields: list[tuple[str, str, int | None]]
    fields = [("gate", "gate_up", 0), ("up", "gate_up", 1), ("down", "down", None)]
    if "gate_up" not in layout.tensors:
        fields = [(matrix, matrix, None) for matrix in MATRICES if matrix in layout.tensors]
    return PerExpert(
        layout.where,
        [
            {
                matrix: _Stack(layout, arrangement, found, field, half).parts(expert)
                for matrix, field, half in fields
            }
            for expert in range(found[0])
        ],
    )


def _explain_sizes(
    layout: StackedExperts, arrangement: Stacked, sizes: tuple[int, int, int]
) -> None:
    for field, info in layout.tensors.items():
        wanted = stacked_shapes(arrangement, *sizes, codes_per_element(info))[field]
        if info.shape != wanted:
            raise ValueError(f"{info} has shape {list(info.shape)}; expected {list(wanted)}")


@dataclass(frozen=True)
class _Stack:
    """The tensors of one field of a layout. half: the half of them to use, or None."""

    layout: StackedExperts
    arrangement: Stacked
    sizes: tuple[int, int, int]
    field: str
    half: int | None

    def parts(self, expert: int) -> Parts:
        tensors = self.layout.tensors
        result: Parts = {"weight": self._part(tensors[self.field], expert)}
        for name, info in self.layout.scales[self.field].items():
            result[name] = self._scale(info, expert)
        if f"{self.field}_bias" in tensors:
            result["bias"] = self._part(tensors[f"{self.field}_bias"], expert)
        return result

    def _part(self, info: TensorInfo, expert: int, interleaved: bool | None = None) -> Part:
        """The part of a tensor that belongs to this half."""
        shape, transposed = self._one(info)
        if self.half is None:
            return Part.of(info, shape, expert, transposed)
        if interleaved is None:
            interleaved = self.arrangement.interleaved
        shape = (shape[0] // 2, *shape[1:])
        return Part.of(info, shape, expert, transposed, self.half, interleaved)

    def _one(self, info: TensorInfo) -> tuple[tuple[int, ...], bool]:
        """The shape of one expert's part after any transposition, and whether it is transposed."""
        if not info.shape or info.shape[0] != self.sizes[0]:
            raise ValueError(
                f"{info} has shape {list(info.shape)}; expected [{self.sizes[0]}, ...], with the"
                " experts in the first dimension"
            )
        shape = info.shape[1:]
        transposed = self.arrangement.columns and len(shape) == 2
        return (shape[::-1] if transposed else shape), transposed

    def _scale(self, info: TensorInfo, expert: int) -> Part:
        if info.shape in ((), (1,)):
            return Part.of(info, (), None)
        shape, transposed = self._one(info)
        _, hidden, inter = self.sizes
        blocks = len(shape) == 2 and shape[1] == -(-hidden // BLOCK_SIZE)
        rows = shape[0] if shape else 1
        one = math.prod(shape) == 1 or (blocks and rows == 1 and 2 * inter <= BLOCK_SIZE)
        if self.half is None or one:  # gate and up share it
            return Part.of(info, shape, expert, transposed)
        if rows == 2 * inter:
            return self._part(info, expert)
        # A block must not have rows of both, and such a number of rows would be ambiguous.
        if blocks and inter % BLOCK_SIZE and rows == -(-2 * inter // BLOCK_SIZE):
            raise ValueError(
                f"{info}: scales per block of {BLOCK_SIZE} rows need an intermediate size that is a"
                f" multiple of {BLOCK_SIZE} where gate and up are one tensor; got {inter}"
            )
        per_half = (
            rows == 2 * -(-inter // BLOCK_SIZE) and blocks and not self.arrangement.interleaved
        )
        if rows == 2 or per_half:
            return self._part(info, expert, interleaved=False)
        raise ValueError(
            f"{info} has shape {list(info.shape)}; expected scales for {2 * inter} rows (gate's and"
            " up's) of each expert"
        )
