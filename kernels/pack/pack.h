// Source weights to the packed layouts of kt/format.h. The same code on every machine, up to AVX2:
// the packed bytes do not depend on the CPU or on how the work is split.
#pragma once
#include <cstdint>

#include "kt/layout.h"
#include "kt/types.h"

namespace kt {

// A matrix as its source has it, row-major. Dense weights (scale is null, no blocks) are bf16, fp16
// or float32 [N, K] and are taken over (kBF16) or quantised here (kInt8Row, kInt4Row, kInt4Group).
// Quantised weights are taken over bit for bit:
//   kInt8Row    data int8 [N, K]; scale float32 [N]
//   kInt4Row    data uint8 [N, K/2], column 2j in the low nibble of byte j; scale float32 [N];
//               W = (nibble - 8) * scale. K is even
//   kInt4Group  the same; scale [N, K/group] of the layout's scale type
//   kInt4Zero   the same, and zero uint8 [N, K/group] of 0..16; W = (nibble - zero) * scale
//   kFp8Block   data e4m3 [N, K]; scale float32 [ceil(N/128), ceil(K/128)]
//   kFp8Row     data e4m3 [N, K]; scale float32 [N]
//   kMxFp8      data e4m3 [N, K]; scale ue8m0 [N, K/32]
//   kMxFp4      data uint8 [N, K/2], e2m1 nibbles as above; scale ue8m0 [N, K/32]
//   kNvFp4      the same; scale e4m3 [N, K/16]; global float32
// and ggml's formats as raw blocks, [N, K / block] of them, with all their scales in them.
struct WeightSource {
  const void* data;
  DType dtype;                  // of dense weights
  const void* scale = nullptr;  // null: dense weights
  const void* zero = nullptr;
  float global = 1;
  bool blocks = false;  // data are ggml's blocks
  bool search = false;  // of dense weights to kInt4Group: scales that lose least, see pack_tile
};

// The part of a source that is packed: columns [col0, col0 + layout.cols) and rows from row0 on. A
// pool packs its part, while scales per row come from whole rows. col0 is a multiple of the
// layout's split_unit().
struct MatrixSource {
  WeightSource weights;
  int64_t cols;        // of the whole matrix; also its row stride
  int64_t row0, col0;  // the first row and column of the part
};

// What is wrong with the weights of a tile, or kNone.
enum class PackError : int {
  kNone = 0,
  // A dense weight is not finite (integer formats), or too large for its group's fp16 scale.
  kNotFinite,
  kScaleOverflow,
  // A quantised weight is NaN; a scale is NaN, infinite or negative (-0 is fine, except that e4m3
  // scales have no sign; group scales and those of ggml's blocks may be negative); a zero point is
  // above 16.
  kNanCode,
  kBadScale,
  kBadGroupScale,
  kBadBlockScale,
  kBadSubScale,  // of packed tiles only
  kBadUe8m0Scale,
  kBadE4m3Scale,
  kBadZero,
  kBadGlobal,
  // The format is not packed from such a source.
  kNeedsDense,
  kNeedsQuantised,
  kNeedsBlocks,
  kNeedsFp16Scales,
  kNeedsZeros,
};

// What is wrong and what is accepted, without a full stop; "" for kNone.
const char* describe(PackError error);

// Whether the error lies in a row, rather than in the whole matrix.
bool is_of_a_row(PackError error);

// Whether tile number `tile` (rows 32 * tile ... of the part) can be packed. *bad_row receives the
// row (of the whole matrix) where an error lies.
PackError check_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row);

// Floats of scratch that pack_tile needs, of any contents.
int64_t pack_scratch(const MatrixLayout& layout, const WeightSource& weights);

// Packs a tile to dst (layout.tile_bytes(), aligned to 64 bytes), reading the source once. Checks
// what check_tile checks; after an error dst holds anything. Dense weights:
//   int8 row    scale = absmax / 127, q = rint(w * (127 / absmax)), within +-127
//   int4 row    scale = absmax / 7,   q = rint(w * (7 / absmax)), within +-7
//   int4 group  scale = fp16(absmax / 7), q = rint(w / scale), within +-7; with `search` the scale
//               of search_scale, of either sign, and q from -8 to 7
PackError pack_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                    float* scratch, uint8_t* dst, int64_t* bad_row);

// The dequantised float32 weights of a packed matrix into rows of dst_stride floats.
void unpack_matrix(const MatrixLayout& layout, const uint8_t* tiles, int64_t tile_stride,
                   float* dst, int64_t dst_stride);

}  // namespace kt
