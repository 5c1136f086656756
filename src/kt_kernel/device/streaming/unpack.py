"""Unpacks the packed weights of experts on the GPU, into what an engine's kernels take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...weights.formats import WeightForm
from .prepared import PreparedKernel

_TILE_ROWS = 32
_PART_COLUMNS = 32
_PARTS = 4  # of 32 columns, that a program unpacks
_WARPS = 4
_ALIGNMENT = 16  # bytes, for which Triton compiles


@functools.cache
def kernel_constants(form: WeightForm, columns: int, parts: int = _PARTS) -> dict[str, Any]:
    """The constants of `unpack_kernel.unpack` for matrices of a form with this many columns.

    They follow from the format's row in kernels/include/kt/format.h.
    """
    f = form.format
    sub_bytes = 0
    if f.ggml and f.scale_columns:
        sub_bytes = 2 if f.minimum and f.scale_bits > 4 else 1
    table = bytes(16)
    if f.code_type == "iq4":
        table = bytes(int(value) + 128 for value in f.code_values)
    return {
        "CODE": f.code_type,
        "BITS": f.bits,
        "LOW_BITS": f.planes[0],
        "ORDER": sum(f.byte_order.index(column) << 2 * column for column in range(4)),
        "OFFSET": -int(f.code_values[0]) if f.code_type == "unsigned" else 0,
        **{f"WORD{i}": int.from_bytes(table[4 * i : 4 * i + 4], "little") for i in range(4)},
        "SCALE": f.scale_kind,
        "SCALE_TYPE": form.scale_type,
        "SUBS": _PART_COLUMNS // f.scale_columns if f.scale_columns else 1,
        "SUB_BITS": f.scale_bits,
        "SUB_BYTES": sub_bytes,
        "ZERO": f.zero_points,
        "MINIMUM": f.minimum,
        "HEAD_BYTES": form.head_bytes(columns),
        "BLOCK_PARTS": form.block_columns // _PART_COLUMNS,
        "BLOCK_BYTES": form.block_bytes,
        "BLOCK_SCALE_BYTES": form.block_scale_bytes,
        "PARTS": parts,
    }


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix of some experts, as tiles of the packed layout.

    Attributes:
        form: how it is stored.
        rows, columns: of the matrix, or of the part of it that a pool holds.
        begin: bytes from the begin of an expert to the matrix's first tile.
        tile_stride: bytes from tile to tile.
        prepared: launches of kernels that read it.
    """

    form: WeightForm
    rows: int
    columns: int
    begin: int
    tile_stride: int
    prepared: PreparedKernel = field(
        default_factory=PreparedKernel, init=False, repr=False, compare=False
    )

    def unpack(
        self, packed: torch.Tensor, out: torch.Tensor, *, parts: int = _PARTS, warps: int = _WARPS
    ) -> Callable[[], Any] | None:
        """Starts unpacking on the current stream.

        packed: uint8 [n, expert bytes], contiguous, on the device. out: [n, rows, columns] of the
        same device, bf16, fp16 or fp32, its last stride 1; each weight is rounded to it once from
        float32. parts, warps: how much a program of the kernel does, and with how many threads.

        The kernel is compiled once for each kind of arguments; later launches cost the host
        little. Returns what `PreparedKernel.launch` returns; None if there was nothing to do, too.
        """
        experts = out.shape[0]
        assert out.shape == (experts, self.rows, self.columns) and out.stride(2) == 1
        assert packed.dtype == torch.uint8 and packed.is_contiguous() and len(packed) >= experts
        if not experts:
            return None
        grid = (
            -(-self.columns // (parts * _PART_COLUMNS)),
            -(-self.rows // _TILE_ROWS),
            experts,
        )
        from .unpack_kernel import unpack  # Triton may be missing

        place = packed[:, self.begin :]
        strides = self.tile_stride, packed.stride(0), out.stride(1), out.stride(0)
        sizes = self.rows, self.columns, *strides
        offsets = out.data_ptr() % _ALIGNMENT, place.data_ptr() % _ALIGNMENT
        return self.prepared.launch(
            unpack,
            grid,
            (place, out, *sizes),
            lambda: kernel_constants(self.form, self.columns, parts),
            kind=(unpack, out.dtype, strides, offsets, parts, warps),
            device=out.device,
            warps=warps,
        )
