// What a tile is made of: rows of bytes become the steps of kt/format.h, and values per row and
// block of columns its scales.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kt/format.h"

namespace kt {

// How four bytes of a row become its lane of a step.
enum class LaneOrder {
  kPlain,    // as they are: 16-bit steps, and values that pack/ quantised
  kPairs,    // bytes 0, 2, 1, 3: 8-bit steps of e4m3
  kNibbles,  // eight nibbles, low first, to byte b = nibble b | nibble b + 4 << 4: 4-bit steps
};

// The rows of a tile, `stride` bytes apart. Rows past `count` and bytes past `bytes` are `pad`.
struct ByteRows {
  const uint8_t* first;
  int64_t stride, bytes, count;
  uint8_t pad;
};

// Writes all steps of a tile, and nothing else of it. `tile` is aligned to 16 bytes.
void write_steps(const MatrixLayout& layout, const ByteRows& rows, LaneOrder order, uint8_t* tile);

// Rows of a tile that the matrix has; the last tile may have fewer than 32.
inline int64_t tile_rows(const MatrixLayout& layout, int64_t tile) {
  return std::min(kTileRows, layout.rows - tile * kTileRows);
}

// Values of a tile's rows, `count` per row, `stride` bytes from row to row; rows past `rows` and
// values past `count` are `pad`.
template <class T> struct ScaleRows {
  const uint8_t* first;
  int64_t stride, count, rows;
  T pad;
};

// Writes value j of every row to place j % per_block of block j / per_block; places are 32 values
// long and begin `offset` bytes into the block.
template <class T>
void write_scales(const MatrixLayout& layout, const ScaleRows<T>& from, int64_t per_block,
                  int64_t offset, uint8_t* tile) {
  uint8_t* block = tile + layout.head_bytes() + offset;
  for (int64_t j = 0; j < round_up(from.count, per_block); ++j) {
    T lanes[kTileRows];
    std::fill(lanes, lanes + kTileRows, from.pad);
    if (j < from.count)
      for (int64_t n = 0; n < from.rows; ++n)
        std::memcpy(lanes + n, from.first + n * from.stride + j * int64_t(sizeof(T)), sizeof(T));
    std::memcpy(
        block + j / per_block * layout.block_bytes() + j % per_block * int64_t(sizeof lanes), lanes,
        sizeof lanes);
  }
}

}  // namespace kt
