"""Writes the packed bytes of a matrix value by value, from the text of kernels/include/kt/format.h.

Slow on purpose, and independent of the C++. The output of kernels/pack is compared with it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import ggml, sources
from .ggml import GgmlSource
from .sources import (
    BF16,
    FP8_BLOCK,
    FP8_ROW,
    INT4_GROUP,
    INT4_ROW,
    INT4_ZERO,
    INT8_ROW,
    MXFP4,
    MXFP8,
    NVFP4,
    Source,
)

Code = Callable[[int, int], int]  # of row n and column k of a tile
PAD_COLUMNS = {BF16: 32, NVFP4: 32}  # for others: the group, or 64


def step16(code: Code, k: int) -> bytes:
    return b"".join(struct.pack("<HH", code(n, k), code(n, k + 1)) for n in range(32))


def step8(code: Code, k: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> bytes:
    return bytes(code(n, k + i) & 255 for n in range(32) for i in order)


def step_e4m3(code: Code, k: int) -> bytes:
    return step8(code, k, (0, 2, 1, 3))


def step4(code: Code, k: int) -> bytes:
    return bytes(code(n, k + b) | code(n, k + 4 + b) << 4 for n in range(32) for b in range(4))


def plane(codes: sources.Bytes, at: int, bits: int) -> bytes:
    """Bits [at, at + bits) of the codes [32, 32] of rows and columns, as `bits` steps."""
    out = b""
    for first in range(0, 32, 32 // bits):
        for n, b in itertools.product(range(32), range(4)):
            byte = 0
            for j in range(8 // bits):
                q = int(codes[n, first + 4 * j + b])
                byte |= (q >> at & (1 << bits) - 1) << bits * j
            out += bytes([byte])
    return out


def padded(data: bytes, unit: int = 64) -> bytes:
    return data + bytes(-len(data) % unit)


def lanes(array: npt.NDArray[Any], rows: range, column: int, pad: int = 0) -> bytes:
    """One value for each of 32 rows, which may lie outside the array."""
    values = np.full(32, pad, array.dtype)
    for n, row in enumerate(rows):
        if row < array.shape[0] and column < array.shape[1]:
            values[n] = array[row, column]
    return values.tobytes()


def tile_of(source: Source, rows: range) -> bytes:
    n_rows, k = source.codes.shape
    pad_code = 8 if source.format == INT4_GROUP else 0

    def code(n: int, column: int) -> int:
        inside = rows[n] < n_rows and column < k
        return int(source.codes[rows[n], column]) if inside else pad_code

    unit = source.group or PAD_COLUMNS.get(source.format, 64)
    columns = -(-k // unit) * unit
    out = b""
    if source.format == FP8_BLOCK:
        out += padded(source.scale[rows[0] // 128].tobytes())
        return out + b"".join(step_e4m3(code, c) for c in range(0, columns, 4))
    if source.format == FP8_ROW:
        out += lanes(source.scale[:, None], rows, 0)
        return out + b"".join(step_e4m3(code, c) for c in range(0, columns, 4))
    if source.format in (INT4_GROUP, INT4_ZERO):
        for g in range(columns // source.group):
            out += lanes(source.scale, rows, g)
            if source.zero is not None:
                out += lanes(source.zero, rows, g) + bytes(32)
            first = g * source.group
            out += b"".join(step4(code, c) for c in range(first, first + source.group, 8))
        return out
    if source.format == NVFP4:
        out += padded(struct.pack("<f", source.global_scale))
    pad_scale = 0 if source.format == NVFP4 else 127
    for first in range(0, columns, unit):
        for half in (0, 1):
            out += lanes(source.scale, rows, first // (unit // 2) + half, pad_scale)
        if source.format == MXFP8:
            out += b"".join(step_e4m3(code, c) for c in range(first, first + unit, 4))
        else:
            assert source.format in (MXFP4, NVFP4)
            out += b"".join(step4(code, c) for c in range(first, first + unit, 8))
    return out


PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # by bits of a code


def ggml_tile_of(source: GgmlSource, rows: range) -> bytes:
    parts = ggml.parts_of(source)

    def tile(array: npt.NDArray[Any], block: int) -> npt.NDArray[Any]:
        """[32, ...] of a block, with zeros for missing rows."""
        values = np.zeros((32, *array.shape[2:]), array.dtype)
        for n, row in enumerate(rows):
            if row < array.shape[0]:
                values[n] = array[row, block]
        return values

    out = b""
    for block in range(source.blocks.shape[1]):
        for half in parts.halves:
            out += tile(half, block).tobytes()
        scales = tile(parts.scales, block)
        for sub, byte in itertools.product(*map(range, scales.shape[1:])):
            out += scales[:, sub, byte].tobytes()
        codes = tile(parts.codes, block)
        for first in range(0, codes.shape[1], 32):
            at = 0
            for bits in PLANES[ggml.CODE_BITS[source.format]]:
                out += plane(codes[:, first : first + 32], at, bits)
                at += bits
    return out


def tiles_of(source: Source | GgmlSource) -> sources.Bytes:
    """[tiles, bytes]"""
    count = -(-source.shape[0] // 32)
    tiles = [
        ggml_tile_of(source, rows) if isinstance(source, GgmlSource) else tile_of(source, rows)
        for rows in (range(32 * t, 32 * t + 32) for t in range(count))
    ]
    return np.array([np.frombuffer(t, np.uint8) for t in tiles])


def bf16_bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to nearest, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def dense_tiles_of(format: int, w: npt.NDArray[np.float32], group: int = 0) -> sources.Bytes:
    """The tiles of dense weights, quantised by the rules of kernels/pack/pack.h."""
    n_rows, k = w.shape
    if format == INT4_GROUP:
        most = np.abs(w.reshape(n_rows, k // group, group)).max(axis=2)
        scale = (most / np.float32(7)).astype(np.float16)
        divisor = np.repeat(scale.astype(np.float32), group, axis=1)
        q = np.rint(np.divide(w, divisor, out=np.zeros_like(w), where=divisor != 0))
        codes = (np.clip(q, -7, 7) + 8).astype(np.uint8)
        return tiles_of(Source(INT4_GROUP, group, sources.FP16, codes, scale))
    tiles = []
    row_scale = np.zeros(len(w), np.float32)
    if format == BF16:
        codes = bf16_bits(w).astype(np.int64)
    else:
        limit = np.float32(127 if format == INT8_ROW else 7)
        most = np.abs(w).max(axis=1)
        row_scale = most / limit
        multiplier = np.divide(limit, most, out=np.zeros_like(most), where=most != 0)
        codes = np.rint(w * multiplier[:, None]).astype(np.int64)
    for first in range(0, n_rows, 32):

        def code(n: int, column: int, first: int = first) -> int:
            value = int(codes[first + n, column]) if first + n < n_rows and column < k else 0
            return value + 8 if format == INT4_ROW else value

        rows = range(first, first + 32)
        columns = -(-k // PAD_COLUMNS.get(format, 64)) * PAD_COLUMNS.get(format, 64)
        head = b"" if format == BF16 else lanes(row_scale[:, None], rows, 0)
        if format == INT8_ROW:
            head += lanes(codes.sum(axis=1).astype(np.int32)[:, None], rows, 0)
        step, width = {BF16: (step16, 2), INT8_ROW: (step8, 4), INT4_ROW: (step4, 8)}[format]
        tiles.append(head + b"".join(step(code, c) for c in range(0, columns, width)))
    return np.array([np.frombuffer(t, np.uint8) for t in tiles])
