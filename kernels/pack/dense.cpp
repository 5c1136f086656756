#include "dense.h"

#include <emmintrin.h>

#include <cmath>
#include <cstring>

#include "blocks.h"
#include "eight.h"
#include "scalar.h"

namespace kt {
namespace {

// Lanes of a row, four bytes each: lane s is the row's part of step s (kt/format.h).
using Word = uint32_t;
constexpr uint8_t kZeroNibbles = 0x88;  // u = q + 8

int64_t steps_of(const MatrixLayout& layout) { return layout.cols_padded() / layout.step_cols(); }

const uint8_t* source_row(const MatrixSource& source, int64_t row) {
  return static_cast<const uint8_t*>(source.weights.data) +
         row * source.cols * dtype_bytes(source.weights.dtype);
}

// Where the part's columns of a row begin.
const uint8_t* part_row(const MatrixSource& source, int64_t row) {
  return source_row(source, row) + source.col0 * dtype_bytes(source.weights.dtype);
}

float row_absmax(const MatrixSource& source, int64_t row) {
  return absmax_of(source_row(source, row), source.weights.dtype, source.cols);
}

uint16_t group_scale(float absmax) { return float_to_fp16(absmax / 7.0f); }

// limit / absmax where it is finite, else 0: the row is zero or too small to represent. The same
// rule as for activations (isa/act_quant.inl).
float multiplier_for(float absmax, int limit) {
  const float m = float(limit) / absmax;
  return std::isfinite(m) ? m : 0.0f;
}

// What becomes of eight weights.

struct ToBf16 {
  static constexpr int64_t kWords = 4;
  void operator()(const Eight& x, Word* words) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words),
                     _mm_packs_epi32(to_bf16(x.low), to_bf16(x.high)));
  }
};

// rint within +-limit, as int16: to nearest, ties to even, like the kernels'.
__m128i quantise(__m128 low, __m128 high, int16_t limit) {
  const __m128i q = _mm_packs_epi32(_mm_cvtps_epi32(low), _mm_cvtps_epi32(high));
  return _mm_max_epi16(_mm_set1_epi16(int16_t(-limit)), _mm_min_epi16(_mm_set1_epi16(limit), q));
}

// Eight values within +-7 as nibbles u = q + 8: the first four low, the others high.
Word nibbles_of(__m128i q) {
  const __m128i u = _mm_add_epi16(q, _mm_set1_epi16(8)), bytes = _mm_packus_epi16(u, u);
  return Word(_mm_cvtsi128_si32(_mm_or_si128(bytes, _mm_srli_epi64(bytes, 28))));
}

struct ToInt8 {
  static constexpr int64_t kWords = 2;
  __m128 multiplier;
  __m128i sums = _mm_setzero_si128();
  void operator()(const Eight& x, Word* words) {
    const __m128i q = quantise(_mm_mul_ps(x.low, multiplier), _mm_mul_ps(x.high, multiplier), 127);
    sums = _mm_add_epi32(sums, _mm_madd_epi16(q, _mm_set1_epi16(1)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(words), _mm_packs_epi16(q, q));
  }
  int32_t sum() const {
    int32_t lane[4];
    std::memcpy(lane, &sums, sizeof lane);
    return lane[0] + lane[1] + lane[2] + lane[3];
  }
};

struct ToInt4 {
  static constexpr int64_t kWords = 1;
  __m128 multiplier;
  void operator()(const Eight& x, Word* words) {
    *words = nibbles_of(quantise(_mm_mul_ps(x.low, multiplier), _mm_mul_ps(x.high, multiplier), 7));
  }
};

// By division: the scale is what the fp16 says, not the exact quotient.
struct ToInt4Group {
  static constexpr int64_t kWords = 1;
  __m128 scale;
  void operator()(const Eight& x, Word* words) {
    *words = nibbles_of(quantise(_mm_div_ps(x.low, scale), _mm_div_ps(x.high, scale), 7));
  }
};

// Writes the words of n columns, and of zeros up to `padded`; both count from p. Returns `to` with
// what it has summed: a copy of its own stays in registers.
template <DType kType, class To>
To convert_as(const uint8_t* p, int64_t n, int64_t padded, To to, Word* words) {
  constexpr int64_t kBytes = 8 * dtype_bytes(kType);
  int64_t k = 0;
  for (; k + 8 <= n; k += 8, p += kBytes, words += To::kWords) to(load_eight<kType>(p), words);
  for (; k < padded; k += 8, words += To::kWords) {
    uint8_t room[kBytes] = {};
    if (k < n) std::memcpy(room, p, size_t((n - k) * dtype_bytes(kType)));
    to(load_eight<kType>(room), words);
  }
  return to;
}

template <class To>
To convert(const uint8_t* p, DType type, int64_t n, int64_t padded, To to, Word* words) {
  switch (type) {
    case DType::kBF16: return convert_as<DType::kBF16>(p, n, padded, to, words);
    case DType::kFP16: return convert_as<DType::kFP16>(p, n, padded, to, words);
    default: return convert_as<DType::kFP32>(p, n, padded, to, words);
  }
}

// Tiles of each kind: `rows` rows from row `first` of the source on; words is scratch for 32 rows.

void write_words(const MatrixLayout& layout, const Word* words, int64_t rows, uint8_t pad,
                 const BlockValues& scales, uint8_t* dst) {
  const int64_t bytes = steps_of(layout) * int64_t(sizeof(Word));
  write_blocks(layout, {reinterpret_cast<const uint8_t*>(words), bytes, bytes, rows, pad},
               LaneOrder::kPlain, scales, {}, dst);
}

void pack_bf16(const MatrixLayout& layout, const MatrixSource& source, int64_t first, int64_t rows,
               Word* words, uint8_t* dst) {
  if (source.weights.dtype == DType::kBF16)  // bit for bit
    return write_blocks(layout,
                        {part_row(source, first), source.cols * 2, layout.cols * 2, rows, 0},
                        LaneOrder::kPlain, {}, {}, dst);
  for (int64_t n = 0; n < rows; ++n)
    convert(part_row(source, first + n), source.weights.dtype, layout.cols, layout.cols_padded(),
            ToBf16{}, words + n * steps_of(layout));
  write_words(layout, words, rows, 0, {}, dst);
}

void pack_rows(const MatrixLayout& layout, const MatrixSource& source, int64_t first, int64_t rows,
               Word* words, uint8_t* dst) {
  const bool int8 = layout.format == WeightFormat::kInt8Row;
  const int limit = int8 ? 127 : 7;
  float scale[kTileRows] = {};
  int32_t sum[kTileRows] = {};
  for (int64_t n = 0; n < rows; ++n) {
    const float absmax = row_absmax(source, first + n);
    const float multiplier = multiplier_for(absmax, limit);
    scale[n] = multiplier == 0 ? 0 : absmax / float(limit);
    const auto convert_row = [&](auto to) {
      return convert(part_row(source, first + n), source.weights.dtype, layout.cols,
                     layout.cols_padded(), to, words + n * steps_of(layout));
    };
    if (int8)
      sum[n] = convert_row(ToInt8{_mm_set1_ps(multiplier)}).sum();
    else
      convert_row(ToInt4{_mm_set1_ps(multiplier)});
  }
  std::memcpy(dst, scale, sizeof scale);
  if (int8) std::memcpy(dst + sizeof scale, sum, sizeof sum);
  write_words(layout, words, rows, int8 ? 0 : kZeroNibbles, {}, dst);
}

void pack_groups(const MatrixLayout& layout, const MatrixSource& source, int64_t first,
                 int64_t rows, Word* words, uint8_t* dst) {
  const DType type = source.weights.dtype;
  const int64_t steps = steps_of(layout), groups = layout.cols / layout.group;
  // Scales of 32 rows wait in the part of the scratch after the words.
  auto* scales = reinterpret_cast<uint16_t*>(words + kTileRows * steps);
  for (int64_t n = 0; n < rows; ++n) {
    const uint8_t* p = part_row(source, first + n);
    Word* to_words = words + n * steps;
    for (int64_t g = 0; g < groups; ++g) {
      const uint16_t scale = group_scale(absmax_of(p, type, layout.group));
      scales[n * groups + g] = scale;
      if (scale != 0)
        convert(p, type, layout.group, layout.group, ToInt4Group{_mm_set1_ps(fp16_to_float(scale))},
                to_words);
      else
        std::memset(to_words, kZeroNibbles, size_t(layout.group / 2));
      p += layout.group * dtype_bytes(type);
      to_words += layout.group / 8;
    }
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(scales);
  write_words(layout, words, rows, kZeroNibbles, {{bytes, groups * 2, groups * 2, rows, 0}, 2, 1},
              dst);
}

}  // namespace

PackError check_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                      int64_t* bad_row) {
  if (layout.format == WeightFormat::kBF16) return PackError::kNone;
  for (int64_t n = 0; n < tile_rows(layout, tile); ++n) {
    const int64_t row = *bad_row = source.row0 + tile * kTileRows + n;
    const float absmax = row_absmax(source, row);
    if (!std::isfinite(absmax)) return PackError::kNotFinite;
    if (layout.format == WeightFormat::kInt4Group && group_scale(absmax) == 0x7c00)
      return PackError::kScaleOverflow;  // that of the group that holds the row's largest weight
  }
  return PackError::kNone;
}

// The words of 32 rows, then a scale of two bytes per row and group.
int64_t dense_scratch(const MatrixLayout& layout) {
  const int64_t groups = layout.has_group() ? layout.cols / layout.group : 0;
  return kTileRows * steps_of(layout) + kTileRows / 2 * groups;
}

void pack_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                float* scratch, uint8_t* dst) {
  const int64_t rows = tile_rows(layout, tile), first = source.row0 + tile * kTileRows;
  auto* words = reinterpret_cast<Word*>(scratch);
  switch (layout.format) {
    case WeightFormat::kBF16: return pack_bf16(layout, source, first, rows, words, dst);
    case WeightFormat::kInt4Group: return pack_groups(layout, source, first, rows, words, dst);
    default: return pack_rows(layout, source, first, rows, words, dst);
  }
}

}  // namespace kt
