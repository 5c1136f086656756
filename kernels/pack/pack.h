// Packs source weights to the layouts of kt/format.h. The code is the same on every machine (at
// most AVX2): the packed bytes depend neither on the CPU nor on how the work is split.
#pragma once
#include <cstdint>

#include "kt/layout.h"
#include "kt/types.h"

namespace kt {

// A matrix as in its source, row-major. Dense weights (scale is null, blocks is false) are bf16,
// fp16 or float32 [N, K]. They are kept (kBF16) or quantised here (kInt8Row, kInt4Row, kInt4Group).
// Quantised weights are kept bit for bit:
//   kInt8Row    data int8 [N, K]; scale float32 [N]
//   kInt4Row    data uint8 [N, K/2], column 2j in the low nibble of byte j; scale float32 [N];
//               W = (nibble - 8) * scale. K is even
//   kInt4Group  as kInt4Row; scale [N, K/group] of the layout's scale type
//   kInt4Zero   as kInt4Group, and zero uint8 [N, K/group] of 0..16; W = (nibble - zero) * scale
//   kFp8Block   data e4m3 [N, K]; scale float32 [ceil(N/128), ceil(K/128)]
//   kFp8Row     data e4m3 [N, K]; scale float32 [N]
//   kMxFp8      data e4m3 [N, K]; scale ue8m0 [N, K/32]
//   kMxFp4      data uint8 [N, K/2], e2m1 nibbles as above; scale ue8m0 [N, K/32]
//   kNvFp4      as kMxFp4; scale e4m3 [N, K/16]; global float32
// ggml's formats are raw blocks, [N, K / block], which contain all their scales.
struct WeightSource {
  const void* data;
  DType dtype;                  // of dense weights
  const void* scale = nullptr;  // null: dense weights
  const void* zero = nullptr;
  float global = 1;
  bool blocks = false;  // data are ggml's blocks
  bool search = false;  // dense weights to kInt4Group: use the scales with the least error
};

// The part of a source to pack: columns [col0, col0 + layout.cols) and rows from row0 on. A pool
// packs only its part, but row scales are computed from whole rows. col0 is a multiple of the
// layout's split_unit().
struct MatrixSource {
  WeightSource weights;
  int64_t cols;        // of the whole matrix; also its row stride
  int64_t row0, col0;  // the first row and column of the part
};

// The error in the weights of a tile, or kNone.
enum class PackError : int {
  kNone = 0,
  // A dense weight is not finite (integer formats), or too large for its group's fp16 scale.
  kNotFinite,
  kScaleOverflow,
  // A quantised weight is NaN, a zero point is above 16, or a scale is NaN, infinite or negative.
  // -0 is accepted, except in e4m3 scales, which have no sign. Scales of integer codes may be
  // negative.
  kNanCode,
  kBadScale,
  kBadSignedScale,
  kBadBlockScale,
  kBadSubScale,  // only in packed tiles
  kBadUe8m0Scale,
  kBadE4m3Scale,
  kBadZero,
  kBadGlobal,
  // The format cannot be packed from such a source.
  kNeedsDense,
  kNeedsQuantised,
  kNeedsBlocks,
  kNeedsFp16Scales,
  kNeedsZeros,
};

// Describes the error and what is accepted, without a full stop; "" for kNone.
const char* describe(PackError error);

// Whether the error is in a row, not in the whole matrix.
bool is_of_a_row(PackError error);

// Checks whether tile number `tile` (rows 32 * tile ... of the part) can be packed. *bad_row
// receives the row (of the whole matrix) that has the error.
PackError check_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row);

// Floats of scratch that pack_tile needs; their contents do not matter.
int64_t pack_scratch(const MatrixLayout& layout, const WeightSource& weights);

// Packs a tile to dst (layout.tile_bytes(), aligned to 64 bytes) and reads the source once. Does
// the checks of check_tile; after an error, the contents of dst are undefined. Dense weights:
//   int8 row    scale = absmax / 127, q = rint(w * (127 / absmax)), within +-127
//   int4 row    scale = absmax / 7,   q = rint(w * (7 / absmax)), within +-7
//   int4 group  scale = fp16(absmax / 7), q = rint(w / scale), within +-7; with `search`, the scale
//               of search_scale, which may be negative, and q from -8 to 7
PackError pack_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                    float* scratch, uint8_t* dst, int64_t* bad_row);

// Writes the dequantised float32 weights of a packed matrix to rows of dst_stride floats.
void unpack_matrix(const MatrixLayout& layout, const uint8_t* tiles, int64_t tile_stride,
                   float* dst, int64_t dst_stride);

}  // namespace kt
