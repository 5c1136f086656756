"""The Triton kernel that turns packed tiles into the codes and scales of an engine's kernels.

As `streaming.unpack_kernel`, but the codes stay codes, so it writes a fraction of the bytes.
"""

import triton
import triton.language as tl

from .streaming.unpack_kernel import COLUMNS, ROWS, _halves, _plane, _to_bf16, _words

_BLOCK_ROWS = tl.constexpr(128)  # of a scale of "block"


@triton.jit
def repack(
    packed,
    codes,
    scales,
    rows,
    columns,
    tile_stride,
    code_stride,
    scale_stride,
    BITS: tl.constexpr,
    ORDER: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BLOCK_SCALE_BYTES: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Repacks one matrix of codes of 4 or 8 BITS; the constants are those of
    `streaming.unpack.kernel_constants`.

    packed: uint8, the first tile of the matrix. codes: uint8 [rows, columns * BITS / 8], of 4 bits
    the even column of two in the low half. scales: with SCALE "group" [rows, groups of columns], of
    the packed type or rounded to bfloat16; with "block" float32 [blocks of 128 rows, blocks of 128
    columns], with "row" float32, one per row. The strides are in elements.
    Grid: (parts / PARTS, tiles). PARTS * COLUMNS is 128.
    """
    tile = tl.program_id(1)
    base = packed + tl.cast(tile, tl.int64) * tile_stride
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    inside = part * COLUMNS < columns
    block = part // BLOCK_PARTS
    block_at = HEAD_BYTES + block * BLOCK_BYTES
    number = tile * ROWS + tl.arange(0, ROWS)
    there = (number < rows)[:, None]
    row = tl.cast(number, tl.int64)[:, None]

    words = base.to(tl.pointer_type(tl.uint32))
    codes_at = (block_at + BLOCK_SCALE_BYTES + part % BLOCK_PARTS * (BITS * 128)) // 4
    code = _plane(words, codes_at, inside, 0, BITS, ORDER)
    in_byte: tl.constexpr = 8 // BITS
    shift = BITS * tl.arange(0, in_byte)[None, None, :]
    bytes_: tl.constexpr = PARTS * COLUMNS // in_byte
    byte = tl.sum(tl.reshape(code, [ROWS, bytes_, in_byte]) << shift, axis=2)
    column = tl.program_id(0) * bytes_ + tl.arange(0, bytes_)[None, :]
    stored = there & (column < columns // in_byte)
    tl.store(codes + row * code_stride + column, byte.to(tl.uint8), mask=stored)

    if SCALE == "group":
        first = there & inside[None, :] & (part % BLOCK_PARTS == 0)[None, :]
        to = scales + row * scale_stride + block[None, :]
        if SCALE_TYPE == 1:
            # As bits, because Triton's interpreter drops subnormals.
            bits = _words(base, block_at, inside, tl.uint16, 2)
            tl.store(to.to(tl.pointer_type(tl.uint16)), bits, mask=first)
        else:
            if SCALE_TYPE == 0:
                scale = _halves(base, block_at, inside)
            else:
                scale = _words(base, block_at, inside, tl.float32, 4)
            if scales.dtype.element_ty == tl.bfloat16:
                tl.store(to, _to_bf16(scale), mask=first)
            else:
                tl.store(to, scale.to(scales.dtype.element_ty), mask=first)
    elif SCALE == "block":
        if tile % (_BLOCK_ROWS // ROWS) == 0:
            block_column = tl.program_id(0)
            scale = tl.load(base.to(tl.pointer_type(tl.float32)) + block_column)
            tl.store(scales + tile // (_BLOCK_ROWS // ROWS) * scale_stride + block_column, scale)
    elif tl.program_id(0) == 0:
        of_tile = base.to(tl.pointer_type(tl.float32)) + tl.arange(0, ROWS)
        tl.store(scales + number * scale_stride, tl.load(of_tile), mask=number < rows)
