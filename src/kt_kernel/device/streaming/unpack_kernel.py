"""The Triton kernel that unpacks packed tiles on the GPU. The layout: kernels/include/kt/format.h.

A program unpacks some columns of one tile of one expert. It reads the words of the tile's lanes as
they lie, and stores rows. Columns come in parts of 32, of which every format's blocks are made.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(32)  # of a tile
COLUMNS = tl.constexpr(32)  # of a part
_STEP_WORDS = tl.constexpr(32)  # of 4 bytes, one per row


@triton.jit
def _plane(words, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, ORDER: tl.constexpr):
    """The bits of one plane of the codes: int32 [rows, parts, columns].

    at [parts]: the word where a part's steps begin; FIRST: number of the plane's first step.
    ORDER: for each column of four, the number of its byte in a lane, in 2 bits.
    """
    parts: tl.constexpr = at.shape[0]
    row = tl.arange(0, ROWS)[:, None, None]
    step = FIRST + tl.arange(0, WIDTH)[None, None, :]
    lanes = tl.load(
        words + at[None, :, None] + step * _STEP_WORDS + row, mask=inside[None, :, None], other=0
    ).to(tl.int32, bitcast=True)
    column = tl.arange(0, COLUMNS // WIDTH)
    if WIDTH == 16:
        shift = 16 * column
    else:
        shift = 8 * ((ORDER >> (2 * (column % 4))) & 3) + WIDTH * (column // 4)
    codes = (lanes[:, :, :, None] >> shift[None, None, None, :]) & ((1 << WIDTH) - 1)
    return tl.reshape(codes, [ROWS, parts, COLUMNS])


@triton.jit
def _byte_of(
    code, WORD0: tl.constexpr, WORD1: tl.constexpr, WORD2: tl.constexpr, WORD3: tl.constexpr
):
    """The byte of a code of 4 bits in a table of 16 bytes."""
    low = tl.where(code < 4, tl.cast(WORD0, tl.int64), tl.cast(WORD1, tl.int64))
    high = tl.where(code < 12, tl.cast(WORD2, tl.int64), tl.cast(WORD3, tl.int64))
    word = tl.where(code < 8, low, high)
    return ((word >> (8 * (code & 3)).to(tl.int64)) & 255).to(tl.int32)


@triton.jit
def _e4m3(code):
    """float32. As fp16 with the same sign, exponent and mantissa, a code is value * 2^-8, also for
    subnormals."""
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e2m1(code):
    """float32. As fp16, value * 2^-14."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _to_bf16(value):
    """Rounded to nearest, ties to even. Triton's interpreter would truncate; there is no NaN."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _words(base, at, inside, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """[rows, parts] of words of SIZE bytes, one per row, that begin at the bytes `at` [parts]."""
    row = tl.arange(0, ROWS)[:, None]
    words = base.to(tl.pointer_type(TYPE))
    return tl.load(words + at[None, :] // SIZE + row, mask=inside[None, :], other=0)


@triton.jit
def _halves(base, at, inside):
    """float32 [rows, parts] of fp16 values."""
    return _words(base, at, inside, tl.float16, 2).to(tl.float32)


@triton.jit
def _bytes(base, at, inside, SUBS: tl.constexpr, STRIDE: tl.constexpr):
    """int32 [rows, parts, SUBS] of bytes, one per row, STRIDE bytes from sub to sub."""
    row = tl.arange(0, ROWS)[:, None, None]
    sub = tl.arange(0, SUBS)[None, None, :] * STRIDE
    return tl.load(base + at[None, :, None] + sub + row, mask=inside[None, :, None], other=0).to(
        tl.int32
    )


@triton.jit
def unpack(
    packed,
    out,
    rows,
    columns,
    tile_stride,
    packed_stride,
    row_stride,
    out_stride,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    ORDER: tl.constexpr,
    OFFSET: tl.constexpr,
    WORD0: tl.constexpr,
    WORD1: tl.constexpr,
    WORD2: tl.constexpr,
    WORD3: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    SUBS: tl.constexpr,
    SUB_BITS: tl.constexpr,
    SUB_BYTES: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMUM: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BLOCK_SCALE_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Unpacks one matrix of each of some experts; the constants are those of `unpack.Constants`.

    packed: uint8, the first tile of the matrix, tile_stride bytes from tile to tile and
    packed_stride from expert to expert. out: the first value [rows, columns], row_stride values
    from row to row and out_stride from expert to expert. Grid: (parts / PARTS, tiles, experts).
    """
    tile = tl.program_id(1)
    expert = tl.cast(tl.program_id(2), tl.int64)
    base = packed + expert * packed_stride + tl.cast(tile, tl.int64) * tile_stride
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    inside = part * COLUMNS < columns
    in_block = part % BLOCK_PARTS
    block_at = HEAD_BYTES + part // BLOCK_PARTS * BLOCK_BYTES
    row = tl.arange(0, ROWS)

    words = base.to(tl.pointer_type(tl.uint32))
    codes_at = (block_at + BLOCK_SCALE_BYTES + in_block * (BITS * 128)) // 4
    code = _plane(words, codes_at, inside, 0, LOW_BITS, ORDER)
    if BITS != LOW_BITS:
        code |= _plane(words, codes_at, inside, LOW_BITS, BITS - LOW_BITS, ORDER) << LOW_BITS

    if CODE == "bf16":
        value = (code << 16).to(tl.float32, bitcast=True)
    elif CODE == "signed":
        value = ((code ^ 128) - 128).to(tl.float32)
    elif CODE == "e4m3":
        value = _e4m3(code)
    elif CODE == "e2m1":
        value = _e2m1(code)
    elif CODE == "iq4":
        value = (_byte_of(code, WORD0, WORD1, WORD2, WORD3) - 128).to(tl.float32)
    else:
        value = (code - OFFSET).to(tl.float32)

    # Scales: [rows, parts, subs], or what broadcasts to it.
    if SCALE == "none":
        weight = value
    else:
        value = tl.reshape(value, [ROWS, PARTS, SUBS, COLUMNS // SUBS])
        if SCALE == "row":
            scale = tl.load(base.to(tl.pointer_type(tl.float32)) + row)[:, None, None]
        elif SCALE == "block":
            number = part * COLUMNS // 128
            floats = base.to(tl.pointer_type(tl.float32))
            scale = tl.load(floats + number, mask=inside, other=0)[None, :, None]
        elif SCALE == "group":
            if SCALE_TYPE == 0:
                scale = _halves(base, block_at, inside)[:, :, None]
            elif SCALE_TYPE == 1:
                # As bits, because Triton's interpreter drops subnormals.
                bits = _words(base, block_at, inside, tl.uint16, 2).to(tl.int32) << 16
                scale = bits.to(tl.float32, bitcast=True)[:, :, None]
            else:
                scale = _words(base, block_at, inside, tl.float32, 4)[:, :, None]
            if ZERO:
                zeros_at = block_at + (BLOCK_SCALE_BYTES - 64)
                zero = _bytes(base, zeros_at, inside, 1, ROWS)
                value -= zero.to(tl.float32)[:, :, :, None]
        elif SCALE == "ue8m0":
            byte = _bytes(base, block_at + in_block * ROWS, inside, SUBS, ROWS)
            # 2^(byte - 127); the subnormal 2^-127 for 0.
            scale = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
        elif SCALE == "e4m3":
            byte = _bytes(base, block_at + in_block * (SUBS * ROWS), inside, SUBS, ROWS)
            # The product of value and scale is exact.
            value *= _e4m3(byte)[:, :, :, None]
            one = tl.zeros([1, 1, 1], tl.int32)
            scale = tl.load(base.to(tl.pointer_type(tl.float32)) + one)
        else:
            scale = _halves(base, block_at, inside)[:, :, None]
            if MINIMUM:
                minimum = _halves(base, block_at + 2 * ROWS, inside)[:, :, None]
            if SUB_BYTES > 0:
                d_bytes: tl.constexpr = 4 * ROWS if MINIMUM else 2 * ROWS
                subs_at = block_at + d_bytes + in_block * (SUBS * SUB_BYTES * ROWS)
                sub = _bytes(base, subs_at, inside, SUBS, SUB_BYTES * ROWS)
                if not MINIMUM:
                    sub = (sub ^ 128) - 128
                elif SUB_BITS == 4:
                    minimum *= (sub >> 4).to(tl.float32)
                    sub = sub & 15
                else:
                    of_minimum = _bytes(base, subs_at + ROWS, inside, SUBS, SUB_BYTES * ROWS)
                    minimum *= of_minimum.to(tl.float32)
                scale *= sub.to(tl.float32)
        weight = value * scale[:, :, :, None]
        if MINIMUM:
            if SUB_BYTES > 0:
                weight -= minimum[:, :, :, None]
            else:
                weight += minimum[:, :, :, None]

    weight = tl.reshape(weight, [ROWS, PARTS * COLUMNS])
    column = tl.program_id(0) * (PARTS * COLUMNS) + tl.arange(0, PARTS * COLUMNS)
    number = tile * ROWS + row
    to = out + expert * out_stride + tl.cast(number, tl.int64)[:, None] * row_stride
    to += column[None, :]
    stored = (number < rows)[:, None] & (column < columns)[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(to, _to_bf16(weight), mask=stored)
    else:
        tl.store(to, weight.to(out.dtype.element_ty), mask=stored)
