"""The engine's weights of hot experts that move: one expert per slot, written from packed ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..weights.expert_tensors import MATRICES
from ..weights.formats import BLOCK_SIZE, SCALE_TYPE_NAMES, WeightForm
from .streaming.experts import PackedExperts
from .streaming.unpack import PackedMatrix, kernel_constants

_TILE_ROWS = 32
_PART_COLUMNS = 32
_PARTS = 4  # of 32 columns, that a program of the kernel repacks
_WARPS = 4
_ALIGNMENT = 16  # bytes, for which Triton compiles


class SlotWeights(ABC):
    """The weights of one layer's slots. inter: I of its experts."""

    num_slots: int
    inter: int

    @abstractmethod
    def write(
        self, experts: PackedExperts, staged: Sequence[torch.Tensor], slot: int
    ) -> list[Any] | None:
        """Starts writing an expert to a slot, on the current stream.

        experts: those of the layer. staged: for each part, the expert's bytes on the device, uint8
        [1, expert_bytes].

        Returns the compiled core's BoundLaunches that write what lies in ``staged`` to this slot
        once more; None in Triton's interpreter.
        """

    @abstractmethod
    def values(self, slot: int, matrix: str) -> torch.Tensor:
        """float32, "gate" or "up" [I, H], or "down" [H, I], as the engine's kernels use it."""

    @abstractmethod
    def same(self, held: torch.Tensor, want: torch.Tensor) -> bool:
        """Whether `values` are what `write` makes of the float32 weights of a packed expert."""


class DenseSlots(SlotWeights):
    """16- or 32-bit weights: w13 [S, 2 I, H], gate's rows before up's, and w2 [S, H, I]."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self.w13, self.w2 = w13, w2
        self.num_slots, self.inter = len(w13), w2.shape[2]

    def write(
        self, experts: PackedExperts, staged: Sequence[torch.Tensor], slot: int
    ) -> list[Any] | None:
        places = experts.places(self.w13[slot : slot + 1], self.w2[slot : slot + 1])
        return _bound(
            experts.parts[i // 3].matrices[i % 3].unpack(staged[i // 3], place)
            for i, place in enumerate(places)
        )

    def matrix(self, slot: int, matrix: str) -> torch.Tensor:
        """The engine's own tensor, to be changed in place."""
        if matrix == "down":
            return self.w2[slot]
        begin = self.inter * MATRICES.index(matrix)
        return self.w13[slot, begin : begin + self.inter]

    def values(self, slot: int, matrix: str) -> torch.Tensor:
        return self.matrix(slot, matrix).float()

    def same(self, held: torch.Tensor, want: torch.Tensor) -> bool:
        return torch.equal(held, want.to(self.w13.dtype).float())


class PackedSlots(SlotWeights):
    """Integers of 4 bits with a scale per group, or of 8 bits with a scale per row, or FP8 with a
    scale per block of 128 x 128.

    w13, w2: codes [S, 2 I, H * bits / 8] and [S, H, I * bits / 8], uint8, int8 or float8_e4m3fn.
    s13, s2: scales [S, 2 I, groups] and [S, H, groups], or float32 [S, 2 I] and [S, H], or float32
    [S, 2 I / 128, H / 128] and [S, H / 128, I / 128]. Codes of 4 bits stand for code - 8.
    """

    def __init__(
        self, w13: torch.Tensor, w2: torch.Tensor, s13: torch.Tensor, s2: torch.Tensor
    ) -> None:
        self.num_slots, self.inter = len(w13), w13.shape[1] // 2
        self._code = w13.dtype
        self._block = BLOCK_SIZE if w13.dtype == torch.float8_e4m3fn else 1  # rows of a scale
        self._w13, self._w2 = w13.view(torch.uint8), w2.view(torch.uint8)
        # Rows of 8 bits have one scale: [S, rows, 1].
        self._s13, self._s2 = (s if s.dim() == 3 else s[..., None] for s in (s13, s2))

    def write(
        self, experts: PackedExperts, staged: Sequence[torch.Tensor], slot: int
    ) -> list[Any] | None:
        return _bound(
            repack(experts.parts[i // 3].matrices[i % 3], staged[i // 3][0], *place)
            for i, place in enumerate(self._places(experts, slot))
        )

    def _places(self, experts: PackedExperts, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Codes and scales of gate, up and down of each part."""
        w13, w2, s13, s2 = (t[slot] for t in (self._w13, self._w2, self._s13, self._s2))
        bits, found = 4 if self._code == torch.uint8 else 8, []
        for part in experts.parts:
            begin, end = part.begin, part.begin + part.size
            for first in (0, self.inter):
                rows = slice(first + begin, first + end)
                found.append((w13[rows], s13[_units(rows, self._block)]))
            columns = slice(begin, end)
            group = part.down.form.group_size or (self._block if self._block > 1 else 0)
            groups = _units(columns, group) if group else slice(0, 1)
            found.append((w2[:, begin * bits // 8 : end * bits // 8], s2[:, groups]))
        return found

    def values(self, slot: int, matrix: str) -> torch.Tensor:
        codes, scales = self._w2[slot], self._s2[slot]
        if matrix != "down":
            begin = self.inter * MATRICES.index(matrix)
            rows = slice(begin, begin + self.inter)
            codes, scales = self._w13[slot, rows], self._s13[slot, _units(rows, self._block)]
        if self._code == torch.uint8:
            numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() - 8
        else:
            numbers = codes.view(self._code).float()
        if self._block > 1:
            scales = scales.repeat_interleave(self._block, 0)[: len(numbers)]
            return numbers * scales.repeat_interleave(self._block, 1)[:, : numbers.shape[1]]
        groups = numbers.unflatten(1, (scales.shape[1], -1))
        return (groups * scales.float()[..., None]).flatten(1)

    def same(self, held: torch.Tensor, want: torch.Tensor) -> bool:
        """Scales may have been rounded."""
        error = 0.0 if self._s13.dtype == torch.float32 else torch.finfo(self._s13.dtype).eps / 2
        return bool(((held - want).abs() <= error * want.abs()).all())


def _units(rows: slice, size: int) -> slice:
    """The blocks, groups or rows of this size that cover some rows or columns."""
    return slice(rows.start // size, -(-rows.stop // size))


def _bound(launched: Iterable[Callable[[], Any] | None]) -> list[Any] | None:
    """BoundLaunches, from what `PreparedKernel.launch` returned."""
    found = [make() for make in launched if make is not None]
    return found or None


def holds_scales(dtype: torch.dtype, form: WeightForm) -> bool:
    """Whether all scales of the form can be stored as ``dtype``, as they are or rounded."""
    return dtype in (torch.bfloat16, getattr(torch, SCALE_TYPE_NAMES[form.scale_type]))


def repack_constants(form: WeightForm, columns: int) -> dict[str, Any]:
    """The constants of `repack_kernel.repack`."""
    known = kernel_constants(form, columns)
    names = ("BITS", "ORDER", "SCALE_TYPE", "HEAD_BYTES", "BLOCK_PARTS", "BLOCK_BYTES")
    found = {name: known[name] for name in (*names, "BLOCK_SCALE_BYTES")}
    return found | {"SCALE": form.format.scale_kind, "PARTS": _PARTS}


def repack(
    matrix: PackedMatrix, packed: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> Callable[[], Any] | None:
    """Starts repacking one matrix on the current stream.

    matrix: INT4_GROUP, INT8_ROW or FP8_BLOCK. packed: uint8, an expert on the device. codes: uint8
    [rows, columns * bits / 8]; scales: for INT4_GROUP [rows, groups], of a type that `holds_scales`
    of this form, for INT8_ROW float32 [rows, 1], for FP8_BLOCK float32 [rows / 128, columns / 128].
    The last strides are 1.

    Returns what `PreparedKernel.launch` returns.
    """
    from .repack_kernel import repack as kernel  # Triton may be missing

    form = matrix.form
    assert not form.format.grouped or holds_scales(scales.dtype, form)
    place = packed[matrix.begin :]
    strides = matrix.tile_stride, codes.stride(0), scales.stride(0)
    sizes = matrix.rows, matrix.columns, *strides
    offsets = tuple(tensor.data_ptr() % _ALIGNMENT for tensor in (place, codes, scales))
    return matrix.prepared.launch(
        kernel,
        (-(-matrix.columns // (_PARTS * _PART_COLUMNS)), -(-matrix.rows // _TILE_ROWS), 1),
        (place, codes, scales, *sizes),
        lambda: repack_constants(form, matrix.columns),
        kind=(kernel, scales.dtype, strides, offsets),
        device=codes.device,
        warps=_WARPS,
    )
