#include "pack.h"

#include <emmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "scalar.h"

namespace kt {
namespace {

// A row of the packed part as the words of its steps: word s is the row's lane of step s
// (kt/format.h). Rows become words one by one, and 32 rows of words become a tile.
using Word = uint32_t;
constexpr Word kZeroNibbles = 0x88888888;  // u = q + 8

int64_t rows_of(const MatrixLayout& layout, int64_t tile) {
  return std::min(kTileRows, layout.rows - tile * kTileRows);
}

int64_t steps_of(const MatrixLayout& layout) {
  switch (layout.format) {
    case WeightFormat::kBF16: return layout.cols_padded() / 2;
    case WeightFormat::kInt8Row: return layout.cols_padded() / 4;
    default: return layout.cols_padded() / 8;
  }
}

const uint8_t* source_row(const MatrixSource& source, int64_t row) {
  return static_cast<const uint8_t*>(source.weights.data) + row * source.cols * dtype_bytes(source.weights.dtype);
}

// absmax of n elements; infinite when one is not finite. Absolute values compare as integers.
float absmax_of(const uint8_t* p, DType dtype, int64_t n) {
  if (dtype == DType::kFP32) {
    int32_t most = 0;
    for (int64_t k = 0; k < n; ++k) {
      int32_t bits;
      std::memcpy(&bits, p + k * 4, 4);
      most = std::max(most, bits & 0x7fffffff);
    }
    return most >= 0x7f800000 ? INFINITY : std::bit_cast<float>(most);
  }
  int16_t most = 0;
  for (int64_t k = 0; k < n; ++k) {
    int16_t bits;
    std::memcpy(&bits, p + k * 2, 2);
    most = std::max(most, int16_t(bits & 0x7fff));
  }
  if (most >= (dtype == DType::kBF16 ? 0x7f80 : 0x7c00)) return INFINITY;
  return dtype == DType::kBF16 ? bf16_to_float(uint16_t(most)) : fp16_to_float(uint16_t(most));
}

float row_absmax(const MatrixSource& source, int64_t row) {
  return absmax_of(source_row(source, row), source.weights.dtype, source.cols);
}

// fp16 scale of the group that begins at column k0 of the part.
uint16_t group_scale(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                     int64_t k0) {
  const uint8_t* p = source_row(source, row) + (source.col0 + k0) * dtype_bytes(source.weights.dtype);
  return float_to_fp16(absmax_of(p, source.weights.dtype, layout.group) / 7.0f);
}

// The part's columns of a row as floats, zeros up to cols_padded.
void load_row(const MatrixLayout& layout, const MatrixSource& source, int64_t row, float* dst) {
  const uint8_t* p = source_row(source, row) + source.col0 * dtype_bytes(source.weights.dtype);
  if (source.weights.dtype == DType::kFP32) {
    std::memcpy(dst, p, size_t(layout.cols) * 4);
  } else if (source.weights.dtype == DType::kBF16) {
    for (int64_t k = 0; k < layout.cols; ++k) dst[k] = load_float(p, DType::kBF16, k);
  } else {
    for (int64_t k = 0; k < layout.cols; ++k) dst[k] = load_float(p, DType::kFP16, k);
  }
  std::fill(dst + layout.cols, dst + layout.cols_padded(), 0.0f);
}

// rint(x) within +-limit as int32, four at a time: to nearest, ties to even, like the kernels'.
__m128i quantise(__m128 x, float limit) {
  x = _mm_max_ps(_mm_set1_ps(-limit), _mm_min_ps(_mm_set1_ps(limit), x));
  return _mm_cvtps_epi32(x);
}

// Four int32 in the int8 range as a word of four bytes.
Word bytes_of(__m128i q) {
  const __m128i halves = _mm_packs_epi32(q, q);
  return Word(_mm_cvtsi128_si32(_mm_packs_epi16(halves, halves)));
}

// Eight quantised values as nibbles u = q + 8: the first four low, the others high.
Word nibbles_of(__m128i low, __m128i high) {
  const __m128i eight = _mm_set1_epi32(8);
  return bytes_of(_mm_add_epi32(low, eight)) | bytes_of(_mm_add_epi32(high, eight)) << 4;
}

// limit / absmax where it is finite, else 0: the row is zero or too small to represent. The same
// rule as for activations (isa/act_quant.inl).
float multiplier_for(float absmax, int limit) {
  const float m = float(limit) / absmax;
  return std::isfinite(m) ? m : 0.0f;
}

// BF16 source weights are taken over bit for bit.
void bf16_words(const MatrixLayout& layout, const MatrixSource& source, int64_t row, float* x,
                Word* words) {
  const int64_t steps = steps_of(layout);
  if (source.weights.dtype == DType::kBF16) {
    std::fill(words + layout.cols / 2, words + steps, 0);
    std::memcpy(words, source_row(source, row) + source.col0 * 2, size_t(layout.cols) * 2);
    return;
  }
  load_row(layout, source, row, x);
  for (int64_t s = 0; s < steps; ++s)
    words[s] = float_to_bf16(x[2 * s]) | Word(float_to_bf16(x[2 * s + 1])) << 16;
}

// Returns the sum of the quantised values.
int32_t int8_words(const float* x, int64_t steps, float multiplier, Word* words) {
  const __m128 m = _mm_set1_ps(multiplier);
  __m128i sum = _mm_setzero_si128();
  for (int64_t s = 0; s < steps; ++s) {
    const __m128i q = quantise(_mm_mul_ps(_mm_loadu_ps(x + 4 * s), m), 127);
    sum = _mm_add_epi32(sum, q);
    words[s] = bytes_of(q);
  }
  alignas(16) int32_t lane[4];
  _mm_store_si128(reinterpret_cast<__m128i*>(lane), sum);
  return lane[0] + lane[1] + lane[2] + lane[3];
}

void int4_words(const float* x, int64_t steps, float multiplier, Word* words) {
  const __m128 m = _mm_set1_ps(multiplier);
  for (int64_t s = 0; s < steps; ++s, x += 8)
    words[s] = nibbles_of(quantise(_mm_mul_ps(_mm_loadu_ps(x), m), 7),
                          quantise(_mm_mul_ps(_mm_loadu_ps(x + 4), m), 7));
}

// The words of one group, by division: its scale is what the fp16 says, not the exact quotient.
void int4_group_words(const float* x, int64_t steps, float scale, Word* words) {
  const __m128 d = _mm_set1_ps(scale);
  for (int64_t s = 0; s < steps; ++s, x += 8)
    words[s] = scale == 0 ? kZeroNibbles
                          : nibbles_of(quantise(_mm_div_ps(_mm_loadu_ps(x), d), 7),
                                       quantise(_mm_div_ps(_mm_loadu_ps(x + 4), d), 7));
}

// `steps` steps of 32 lanes from the rows' words, `stride` words apart.
void interleave(const Word* words, int64_t stride, int64_t steps, uint8_t* dst) {
  for (int64_t s = 0; s < steps; ++s, dst += kStepBytes) {
    Word step[kTileRows];
    for (int64_t n = 0; n < kTileRows; ++n) step[n] = words[n * stride + s];
    std::memcpy(dst, step, sizeof step);
  }
}

// Tiles of each kind: rows `first` ... of the source, of which a tile at the end has fewer than
// 32; x is scratch for a row of floats, words for those of 32 rows.

void pack_bf16(const MatrixLayout& layout, const MatrixSource& source, int64_t first, int64_t rows,
               float* x, Word* words, uint8_t* dst) {
  const int64_t steps = steps_of(layout);
  for (int64_t n = 0; n < rows; ++n) bf16_words(layout, source, first + n, x, words + n * steps);
  std::fill(words + rows * steps, words + kTileRows * steps, 0);
  interleave(words, steps, steps, dst);
}

void pack_rows(const MatrixLayout& layout, const MatrixSource& source, int64_t first, int64_t rows,
               float* x, Word* words, uint8_t* dst) {
  const bool int8 = layout.format == WeightFormat::kInt8Row;
  const int limit = int8 ? 127 : 7;
  const int64_t steps = steps_of(layout);
  float scale[kTileRows] = {};
  int32_t sum[kTileRows] = {};
  for (int64_t n = 0; n < rows; ++n) {
    const float absmax = row_absmax(source, first + n);
    const float multiplier = multiplier_for(absmax, limit);
    scale[n] = multiplier == 0 ? 0 : absmax / float(limit);
    load_row(layout, source, first + n, x);
    if (int8)
      sum[n] = int8_words(x, steps, multiplier, words + n * steps);
    else
      int4_words(x, steps, multiplier, words + n * steps);
  }
  std::fill(words + rows * steps, words + kTileRows * steps, int8 ? 0 : kZeroNibbles);
  std::memcpy(dst, scale, sizeof scale);
  if (int8) std::memcpy(dst + sizeof scale, sum, sizeof sum);
  interleave(words, steps, steps, dst + layout.head_bytes());
}

void pack_groups(const MatrixLayout& layout, const MatrixSource& source, int64_t first,
                 int64_t rows, float* x, Word* words, uint8_t* dst) {
  const int64_t steps = steps_of(layout), group_steps = layout.group / 8;
  const int64_t group_bytes = layout.block_bytes();
  std::memset(dst, 0, size_t(layout.tile_bytes()));  // scales of rows that are not there
  for (int64_t n = 0; n < rows; ++n) {
    load_row(layout, source, first + n, x);
    for (int64_t k = 0; k < layout.cols; k += layout.group) {
      const uint16_t scale = group_scale(layout, source, first + n, k);
      std::memcpy(dst + k / layout.group * group_bytes + n * 2, &scale, 2);
      int4_group_words(x + k, group_steps, fp16_to_float(scale), words + n * steps + k / 8);
    }
  }
  std::fill(words + rows * steps, words + kTileRows * steps, kZeroNibbles);
  for (int64_t s = 0; s < steps; s += group_steps, dst += group_bytes)
    interleave(words + s, steps, group_steps, dst + 2 * kTileRows);
}

int nibble(const uint8_t* lane, int64_t k) {  // k in 0..7
  return int(lane[k & 3] >> (k >= 4 ? 4 : 0) & 15) - 8;
}

}  // namespace

PackError check_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row) {
  if (layout.format == WeightFormat::kBF16) return PackError::kNone;
  for (int64_t n = 0; n < rows_of(layout, tile); ++n) {
    const int64_t row = *bad_row = source.row0 + tile * kTileRows + n;
    if (!std::isfinite(row_absmax(source, row))) return PackError::kNotFinite;
    if (layout.format != WeightFormat::kInt4Group) continue;
    for (int64_t k0 = 0; k0 < layout.cols_padded(); k0 += layout.group)
      if (group_scale(layout, source, row, k0) == 0x7c00) return PackError::kScaleOverflow;
  }
  return PackError::kNone;
}

// One row of floats, then the words of 32 rows.
int64_t pack_scratch(const MatrixLayout& layout) {
  return layout.cols_padded() + kTileRows * steps_of(layout);
}

void pack_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile, float* scratch,
               uint8_t* dst) {
  const int64_t rows = rows_of(layout, tile), first = source.row0 + tile * kTileRows;
  float* x = scratch;
  auto* words = reinterpret_cast<Word*>(scratch + layout.cols_padded());
  switch (layout.format) {
    case WeightFormat::kBF16: return pack_bf16(layout, source, first, rows, x, words, dst);
    case WeightFormat::kInt4Group: return pack_groups(layout, source, first, rows, x, words, dst);
    default: return pack_rows(layout, source, first, rows, x, words, dst);
  }
}

void unpack_matrix(const MatrixLayout& layout, const uint8_t* tiles, int64_t tile_stride,
                   float* dst, int64_t dst_stride) {
  for (int64_t row = 0; row < layout.rows; ++row) {
    const uint8_t* tile = tiles + row / kTileRows * tile_stride;
    const int64_t n = row % kTileRows;
    const uint8_t* steps = tile + layout.head_bytes() + n * 4;
    float row_scale = 0;
    if (layout.head_bytes()) std::memcpy(&row_scale, tile + n * 4, 4);
    for (int64_t k = 0; k < layout.cols; ++k) {
      float& w = dst[row * dst_stride + k];
      switch (layout.format) {
        case WeightFormat::kBF16: {
          uint16_t x;
          std::memcpy(&x, steps + k / 2 * kStepBytes + k % 2 * 2, 2);
          w = bf16_to_float(x);
          break;
        }
        case WeightFormat::kInt8Row:
          w = float(int8_t(steps[k / 4 * kStepBytes + k % 4])) * row_scale;
          break;
        case WeightFormat::kInt4Row:
          w = float(nibble(steps + k / 8 * kStepBytes, k % 8)) * row_scale;
          break;
        case WeightFormat::kInt4Group: {
          const int64_t in_group = k % layout.group;
          const uint8_t* group =
              tile + k / layout.group * layout.block_bytes();
          uint16_t scale;
          std::memcpy(&scale, group + n * 2, 2);
          w = float(
                  nibble(group + 2 * kTileRows + in_group / 8 * kStepBytes + n * 4, in_group % 8)) *
              fp16_to_float(scale);
          break;
        }
      }
    }
  }
}

}  // namespace kt
