// Copies packed tiles from and to files. Files hold whole matrices; a pool holds some columns.
#pragma once
#include "pack.h"

namespace kt {

// Columns of a packed tile that form a tile of their own. `layout` is that of these columns, which
// are whole blocks, except for the last ones of the matrix.
struct PackedColumns {
  MatrixLayout layout;
  const uint8_t* head;  // kFp8Block: starts at the columns' first scale
  const uint8_t* body;

  // Columns [col0, col0 + columns.cols) of a tile; col0 is a multiple of split_unit().
  PackedColumns(const MatrixLayout& whole, const uint8_t* tile, int64_t col0,
                const MatrixLayout& columns);
};

// Writes the columns as a tile of their own, bypassing the caches. If scales or codes differ from
// what packing makes, dst is incomplete and *lane is the row of the tile (0..31) with the error.
// dst is aligned to 64 bytes. The sums of kInt8Row are computed from the codes, not copied.
PackError take_columns(const PackedColumns& from, uint8_t* dst, int64_t* lane);

// Writes a tile of columns from col0 on back into the whole tile that it was taken from. The whole
// tile's head must be zeros before its first columns are written.
void put_columns(const MatrixLayout& columns, const uint8_t* tile, const MatrixLayout& whole,
                 int64_t col0, uint8_t* dst);

}  // namespace kt
