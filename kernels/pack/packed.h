// Packed tiles on their way from and to a file: whole matrices there, columns of them on a pool.
#pragma once
#include "pack.h"

namespace kt {

// Columns of one packed tile that are a tile by themselves: `layout` is of these columns, of whole
// blocks but for the last ones of the matrix.
struct PackedColumns {
  MatrixLayout layout;
  const uint8_t* head;  // kFp8Block: from the columns' first scale on
  const uint8_t* body;

  // Columns [col0, col0 + columns.cols) of a tile; col0 is a multiple of split_unit().
  PackedColumns(const MatrixLayout& whole, const uint8_t* tile, int64_t col0,
                const MatrixLayout& columns);
};

// Writes the columns as a tile of their own, past the caches, unless scales or codes are others
// than packing makes: then dst holds a part, and *lane the row of the tile (0..31) where the error
// lies. dst is aligned to 64 bytes. The sums of kInt8Row are made of the codes, not copied.
PackError take_columns(const PackedColumns& from, uint8_t* dst, int64_t* lane);

// Writes a tile of columns from col0 on into the whole tile that it was taken from. The whole
// tile's head is zeros before its first columns come.
void put_columns(const MatrixLayout& columns, const uint8_t* tile, const MatrixLayout& whole,
                 int64_t col0, uint8_t* dst);

}  // namespace kt
