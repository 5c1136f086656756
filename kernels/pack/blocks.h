// The parts of a tile after its head: rows of bytes become the steps of kt/format.h, and values per
// row and block of columns become the scales before them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kt/layout.h"

namespace kt {

// How four bytes of a row become the row's lane of a step.
enum class LaneOrder {
  kPlain,    // unchanged: 16-bit steps, and values that pack/ quantised
  kPairs,    // bytes 0, 2, 1, 3: 8-bit steps of e4m3
  kNibbles,  // eight nibbles, low first; byte b = nibble b | nibble b + 4 << 4: 4-bit steps
};

// The bytes of a tile's rows, `stride` bytes from row to row. Rows past `count` and bytes past
// `bytes` read as `pad`.
struct ByteRows {
  const uint8_t* first;
  int64_t stride, bytes, count;
  uint8_t pad;
};

// The bytes of 32 rows, `stride` bytes from row to row.
struct Window {
  const uint8_t* first;
  int64_t stride;
};

// Bytes [at, at + bytes) of 32 rows: in place, or copied to `room` (32 * bytes) if they include
// padding.
Window window(const ByteRows& rows, int64_t at, int64_t bytes, uint8_t* room);

// The values of each row in the blocks of a tile: `per_block` values of `size` bytes.
struct BlockValues {
  ByteRows rows;
  int64_t size, per_block;
};

// Writes all blocks of a tile, whose rows are `lanes`. A block begins with scales, zero points
// (either may be empty) and zero bytes up to block_scale_bytes. `tile` is aligned to 64 bytes.
void write_blocks(const MatrixLayout& layout, const ByteRows& lanes, LaneOrder order,
                  const BlockValues& scales, const BlockValues& zeros, uint8_t* tile);

// Copies with non-temporal stores, because packed weights are not read again soon. Ordinary stores
// would read each cache line first and double the traffic. dst is aligned to 32 bytes; bytes is a
// multiple of 32.
void stream_bytes(const uint8_t* src, int64_t bytes, uint8_t* dst);
// Must be called after the last copy of a tile: other threads read the tile once the job is done.
void stream_fence();

// Rows of a tile that the matrix has; the last tile may have fewer than 32.
inline int64_t tile_rows(const MatrixLayout& layout, int64_t tile) {
  return std::min(kTileRows, layout.rows - tile * kTileRows);
}

}  // namespace kt
