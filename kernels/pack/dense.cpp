#include "dense.h"

#include <emmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "scalar.h"
#include "steps.h"

namespace kt {
namespace {

// Lanes of a row, four bytes each: lane s is the row's part of step s (kt/format.h).
using Word = uint32_t;
constexpr uint8_t kZeroNibbles = 0x88;  // u = q + 8

const uint8_t* source_row(const MatrixSource& source, int64_t row) {
  return static_cast<const uint8_t*>(source.weights.data) +
         row * source.cols * dtype_bytes(source.weights.dtype);
}

// Where the part's columns of a row begin.
const uint8_t* part_row(const MatrixSource& source, int64_t row) {
  return source_row(source, row) + source.col0 * dtype_bytes(source.weights.dtype);
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
  const DType dtype = source.weights.dtype;
  const uint8_t* p = part_row(source, row) + k0 * dtype_bytes(dtype);
  return float_to_fp16(absmax_of(p, dtype, layout.group) / 7.0f);
}

// The part's columns of a row as floats, zeros up to cols_padded.
void load_row(const MatrixLayout& layout, const MatrixSource& source, int64_t row, float* dst) {
  const uint8_t* p = part_row(source, row);
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
  if (scale == 0) return void(std::memset(words, kZeroNibbles, size_t(steps) * sizeof(Word)));
  const __m128 d = _mm_set1_ps(scale);
  for (int64_t s = 0; s < steps; ++s, x += 8)
    words[s] = nibbles_of(quantise(_mm_div_ps(_mm_loadu_ps(x), d), 7),
                          quantise(_mm_div_ps(_mm_loadu_ps(x + 4), d), 7));
}

int64_t steps_of(const MatrixLayout& layout) { return layout.cols_padded() / layout.step_cols(); }

// Tiles of each kind: `rows` rows from row `first` of the source on; x is scratch for a row of
// floats, words for those of 32 rows.

ByteRows word_rows(const MatrixLayout& layout, const Word* words, int64_t rows, uint8_t pad) {
  const int64_t bytes = steps_of(layout) * int64_t(sizeof(Word));
  return {reinterpret_cast<const uint8_t*>(words), bytes, bytes, rows, pad};
}

void pack_bf16(const MatrixLayout& layout, const MatrixSource& source, int64_t first, int64_t rows,
               float* x, Word* words, uint8_t* dst) {
  if (source.weights.dtype == DType::kBF16)  // bit for bit
    return write_steps(layout, {part_row(source, first), source.cols * 2, layout.cols * 2, rows, 0},
                       LaneOrder::kPlain, dst);
  const int64_t steps = steps_of(layout);
  for (int64_t n = 0; n < rows; ++n) {
    load_row(layout, source, first + n, x);
    for (int64_t s = 0; s < steps; ++s)
      words[n * steps + s] = float_to_bf16(x[2 * s]) | Word(float_to_bf16(x[2 * s + 1])) << 16;
  }
  write_steps(layout, word_rows(layout, words, rows, 0), LaneOrder::kPlain, dst);
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
  std::memcpy(dst, scale, sizeof scale);
  if (int8) std::memcpy(dst + sizeof scale, sum, sizeof sum);
  write_steps(layout, word_rows(layout, words, rows, int8 ? 0 : kZeroNibbles), LaneOrder::kPlain,
              dst);
}

void pack_groups(const MatrixLayout& layout, const MatrixSource& source, int64_t first,
                 int64_t rows, float* x, Word* words, uint8_t* dst) {
  const int64_t steps = steps_of(layout), groups = layout.cols / layout.group;
  // Scales of 32 rows wait in the part of the scratch after the words.
  auto* scales = reinterpret_cast<uint16_t*>(words + kTileRows * steps);
  for (int64_t n = 0; n < rows; ++n) {
    load_row(layout, source, first + n, x);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t k = g * layout.group;
      const uint16_t scale = scales[n * groups + g] = group_scale(layout, source, first + n, k);
      int4_group_words(x + k, layout.group / 8, fp16_to_float(scale), words + n * steps + k / 8);
    }
  }
  write_scales<uint16_t>(
      layout, {reinterpret_cast<const uint8_t*>(scales), groups * 2, groups, rows, 0}, 1, 0, dst);
  write_steps(layout, word_rows(layout, words, rows, kZeroNibbles), LaneOrder::kPlain, dst);
}

}  // namespace

PackError check_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                      int64_t* bad_row) {
  if (layout.format == WeightFormat::kBF16) return PackError::kNone;
  for (int64_t n = 0; n < tile_rows(layout, tile); ++n) {
    const int64_t row = *bad_row = source.row0 + tile * kTileRows + n;
    if (!std::isfinite(row_absmax(source, row))) return PackError::kNotFinite;
    if (layout.format != WeightFormat::kInt4Group) continue;
    for (int64_t k0 = 0; k0 < layout.cols; k0 += layout.group)
      if (group_scale(layout, source, row, k0) == 0x7c00) return PackError::kScaleOverflow;
  }
  return PackError::kNone;
}

// One row of floats, then the words of 32 rows, then two bytes per row and group.
int64_t dense_scratch(const MatrixLayout& layout) {
  const int64_t groups = layout.has_group() ? layout.cols / layout.group : 0;
  return layout.cols_padded() + kTileRows * steps_of(layout) + kTileRows / 2 * groups;
}

void pack_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                float* scratch, uint8_t* dst) {
  const int64_t rows = tile_rows(layout, tile), first = source.row0 + tile * kTileRows;
  float* x = scratch;
  auto* words = reinterpret_cast<Word*>(scratch + layout.cols_padded());
  switch (layout.format) {
    case WeightFormat::kBF16: return pack_bf16(layout, source, first, rows, x, words, dst);
    case WeightFormat::kInt4Group: return pack_groups(layout, source, first, rows, x, words, dst);
    default: return pack_rows(layout, source, first, rows, x, words, dst);
  }
}

}  // namespace kt
