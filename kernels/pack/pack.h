// Source weights to the packed layouts of kt/format.h. Scalar and the same on every machine: the
// packed bytes do not depend on the CPU or on how the work is split.
#pragma once
#include <cstdint>

#include "kt/format.h"
#include "kt/types.h"

namespace kt {

// A row-major matrix [rows, cols] of dtype, of which columns [col0, col0 + layout.cols) and rows
// from row0 on are packed: a pool packs its part, while scales per row come from whole rows.
struct MatrixSource {
  const void* data;
  DType dtype;
  int64_t cols;        // of the whole matrix; also its row stride
  int64_t row0, col0;  // the first row and column of the part
};

// What is wrong with the weights of a tile, or kNone.
enum class PackError : int { kNone = 0, kNotFinite = 1, kScaleOverflow = 2 };

// Whether tile number `tile` (rows 32 * tile ... of the part) can be packed. Integer formats refuse
// weights that are not finite, and group scales above fp16's range. *bad_row receives the row (of
// the whole matrix) where an error lies.
PackError check_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row);

// Floats of scratch that pack_tile needs.
int64_t pack_scratch(const MatrixLayout& layout);

// Packs a tile that check_tile accepts to dst (layout.tile_bytes()).
//   int8 row    scale = absmax / 127, q = rint(w * (127 / absmax)), within +-127
//   int4 row    scale = absmax / 7,   q = rint(w * (7 / absmax)), within +-7
//   int4 group  scale = fp16(absmax / 7), q = rint(w / scale), within +-7
void pack_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile, float* scratch,
               uint8_t* dst);

// The dequantised float32 weights of a packed matrix into rows of dst_stride floats.
void unpack_matrix(const MatrixLayout& layout, const uint8_t* tiles, int64_t tile_stride,
                   float* dst, int64_t dst_stride);

}  // namespace kt
