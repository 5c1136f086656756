"""Random packed matrices of every format, and the check that a device unpacks them as the core."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kt_kernel import _C
from kt_kernel.device.streaming.unpack import PackedMatrix
from kt_kernel.weights.formats import WeightForm, all_formats

from . import sources
from .core import FORMATS, Format

BY_ID = {format.id: format for format in all_formats()}
ALL = list(dict.fromkeys([*FORMATS, *(Format(*variant) for variant in sources.GGML_VARIANTS)]))
_BEGIN, _GAP = 128, 64  # bytes before a matrix's first tile, and between its tiles
_BITS = {2: torch.int16, 4: torch.int32}


class Shape(NamedTuple):
    rows: int
    columns: int
    parts: int  # of 32 columns, that a program of the kernel unpacks


def packed(format: Format, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of a random matrix, uint8 [tiles, bytes], and the float32 weights that the core unpacks
    from them."""
    if format.scale_type is None:
        weights = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
        weights[rows // 2] = 0
        tiles = _C.pack(*format.form, rows, columns, sources.address_of(weights), sources.FP32)
    else:
        made = sources.make(
            format.code, rows, columns, format.group, format.scale_type, seed=seed, edges=True
        )
        tiles = _C.pack(*format.form, rows, columns, made.address)
    unpacked = _C.unpack(*format.form, rows, columns, tiles)
    return torch.from_numpy(tiles), torch.from_numpy(unpacked)


def form_of(format: Format) -> WeightForm:
    return WeightForm(BY_ID[format.code], format.group, format.scale_type or 0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = _BITS[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def check(format: Format, shape: Shape, dtype: torch.dtype, device: str) -> None:
    """A matrix of two experts, whose tiles have gaps between them, becomes the same bits as in the
    core, and nothing else is written."""
    (columns,) = format.fit(shape.columns)
    rows = shape.rows
    matrices = [packed(format, rows, columns, seed) for seed in range(2)]
    tiles, tile_bytes = matrices[0][0].shape
    stride = tile_bytes + _GAP
    memory = torch.full((2, _BEGIN + tiles * stride), 0xFF, dtype=torch.uint8)
    want = torch.full((2, rows + 2, columns + 3), 7.0, dtype=dtype)
    for i, (of_tiles, weights) in enumerate(matrices):
        memory[i, _BEGIN:].view(tiles, stride)[:, :tile_bytes] = of_tiles
        want[i, 1 : rows + 1, 1 : columns + 1] = weights.to(dtype)
    out = torch.full_like(want, 7.0, device=device)
    PackedMatrix(form_of(format), rows, columns, _BEGIN, stride).unpack(
        memory.to(device), out[:, 1 : rows + 1, 1 : columns + 1], parts=shape.parts
    )
    assert same_bits(out.cpu(), want)
