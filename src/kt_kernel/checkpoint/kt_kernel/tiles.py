"""Undoes the byte order of weights that kt-kernel quantised (its AMXINT8 and AMXINT4).

The order was determined from files that kt-kernel 0.7.2 wrote for known weights.
tests/checkpoint/kt_writer.py implements it independently and is compared with such files.

A matrix W [N rows, K columns] is a flat run of bytes with N float32 scales.

  8 bits  one int8 code per weight, W = code * scale, scale = absmax / 127
  4 bits  two codes per byte, each a two's complement nibble within +-7, W = code * 16 * scale,
          scale = absmax / 112

N is a multiple of 32 and K is a multiple of 64 (8 bits) or 128 (4 bits), so there is no padding.
The order of the bytes, from the outermost dimension to the innermost:

  blocks of 64 rows (8 bits) or 128 rows (4 bits)
  blocks of 3584 columns, the last one smaller
  32 rows
  64 columns (8 bits) or 128 columns (4 bits)
  the two halves of the 32 rows
  16 units of 4 bytes
  16 rows
  4 bytes of a unit: with 8 bits, unit u holds columns 4u to 4u + 3 of the 64; with 4 bits, the low
  nibbles hold these, and the high nibbles hold the columns 64 further right

If K is at most 3584, the blocks of rows make no difference.
"""

from __future__ import annotations

import torch

COLUMN_BLOCK = 3584
ROW_BLOCK = {8: 64, 4: 128}
COLUMN_UNIT = {8: 64, 4: 128}
ROW_UNIT = 32


def row_major(data: torch.Tensor, bits: int, rows: int, columns: int) -> torch.Tensor:
    """The codes of a matrix [rows, columns] in the order of `QuantisedMatrix`.

    data: int8 or uint8 [rows * columns * bits / 8]. bits: 8 or 4. rows and columns must be
    multiples of ROW_UNIT and COLUMN_UNIT. Returns int8 [rows, columns] for INT8_ROW, or uint8
    [rows, columns / 2] for INT4_ROW (code + 8, the even column in the low nibble).
    """
    per_word = 32 // bits
    if data.data_ptr() % 4 or data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32)  # a word is a unit of one row
    out = torch.empty(rows, columns // per_word, dtype=torch.int32, device="cpu")
    width = columns // per_word
    block = min(rows, ROW_BLOCK[bits]) if columns > COLUMN_BLOCK else rows
    whole = rows // block * block
    for first, last, height in ((0, whole, block), (whole, rows, rows - whole)):
        if height:  # the second round is for a smaller last block
            part = words[first * width : last * width].view(-1, height * width)
            _unblock(part, out[first:last].view(-1, height, width), per_word)
    return out.view(torch.int8) if bits == 8 else _in_order(out)


def _unblock(words: torch.Tensor, out: torch.Tensor, per_word: int) -> None:
    """Copies [blocks, words of a block] to [blocks, height, words of a row]."""
    height, width = out.shape[1:]
    step = COLUMN_BLOCK // per_word
    for first in range(0, width, step):
        target = out[:, :, first : first + step].unflatten(2, (-1, 16))
        target = target.unflatten(1, (-1, 2, 16))  # [blocks, tiles, half, row, run, unit]
        last = first + step if first + step < width else width
        tiles = words[:, first * height : last * height].unflatten(1, (height // ROW_UNIT, -1))
        target.copy_(tiles.unflatten(2, (-1, 2, 16, 16)).permute(0, 1, 3, 5, 2, 4))


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Converts nibbles q of columns 64 apart in a byte to q + 8 of neighbouring columns."""
    words ^= -0x77777778  # 0x88888888
    out = torch.empty(len(words), words.shape[1] // 16, 2, 16, dtype=torch.int16, device="cpu")
    for half in range(2):
        x = (words >> 4 * half) & 0x0F0F0F0F
        x |= x >> 4
        x &= 0x00FF00FF
        x |= x >> 8
        out[:, :, half] = x.view(torch.int16)[:, ::2].unflatten(1, (-1, 16))  # the low halves
    return out.flatten(1).view(torch.uint8)
