#include "dense.h"

#include <emmintrin.h>

#include <algorithm>

#include <cmath>
#include <cstring>

#include "blocks.h"
#include "eight.h"
#include "scalar.h"
#include "scale_search.h"

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

// rint as int16: to nearest, ties to even, like the kernels'. A row's values times its multiplier
// round to at most the limit.
__m128i quantise(__m128 low, __m128 high) {
  return _mm_packs_epi32(_mm_cvtps_epi32(low), _mm_cvtps_epi32(high));
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
    const __m128i q = quantise(_mm_mul_ps(x.low, multiplier), _mm_mul_ps(x.high, multiplier));
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
    *words = nibbles_of(quantise(_mm_mul_ps(x.low, multiplier), _mm_mul_ps(x.high, multiplier)));
  }
};

// By division: the scale is what the fp16 says, not the exact quotient. A scale that was rounded
// down makes values above 7.
struct ToInt4Group {
  static constexpr int64_t kWords = 1;
  __m128 scale;
  __m128i least;
  void operator()(const Eight& x, Word* words) {
    const __m128i q = quantise(_mm_div_ps(x.low, scale), _mm_div_ps(x.high, scale));
    *words = nibbles_of(_mm_max_epi16(least, _mm_min_epi16(_mm_set1_epi16(7), q)));
  }
};

// Writes the words of n columns, and of zeros up to `padded`; both count from p. Returns `to` with
// what it has summed: a copy of its own stays in registers.
template <DType kType, class To>
To convert(const uint8_t* p, int64_t n, int64_t padded, To to, Word* words) {
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

// Rows that are converted as they are read, a panel of lanes at a time.
class DenseRows final : public LaneRows {
 public:
  // `rows` rows of the source from row `first` on. group_scales: [rows, groups] of kInt4Group.
  DenseRows(const MatrixLayout& layout, const MatrixSource& source, int64_t first, int64_t rows,
            const uint16_t* group_scales)
      : layout_(layout), source_(source), first_(first), rows_(rows), group_scales_(group_scales) {}

  // Of kInt8Row and kInt4Row.
  float multiplier[kTileRows];
  int32_t sum[kTileRows] = {};  // of the values of kInt8Row, once all lanes were asked for

  Window next(int64_t at, int64_t bytes, uint8_t*) override {
    if (at + bytes > panel_begin_ + panel_bytes_) {
      panel_begin_ = at;
      panel_bytes_ =
          std::min(kMostPanelBytes, layout_.cols_padded() / layout_.step_cols() * 4 - at);
      fill();
    }
    return {panel_ + (at - panel_begin_), panel_bytes_};
  }

 private:
  // Lanes of each row that are made at once: a run long enough for a loop of its own, in all rows
  // small enough for the L1 cache.
  static constexpr int64_t kMostPanelBytes = 256;

  void fill() {
    switch (source_.weights.dtype) {
      case DType::kBF16: return fill_from<DType::kBF16>();
      case DType::kFP16: return fill_from<DType::kFP16>();
      default: return fill_from<DType::kFP32>();
    }
  }

  template <DType kType> void fill_from() {
    const int64_t k = panel_begin_ / 4 * layout_.step_cols();
    const int64_t padded = panel_bytes_ / 4 * layout_.step_cols();
    const int64_t cols = std::clamp(layout_.cols - k, int64_t{0}, padded);
    for (int64_t n = 0; n < rows_; ++n)
      fill_row<kType>(n, k, cols, padded, reinterpret_cast<Word*>(panel_ + n * panel_bytes_));
    const bool nibbles = layout_.step_cols() == 8;
    std::memset(panel_ + rows_ * panel_bytes_, nibbles ? kZeroNibbles : 0,
                size_t((kTileRows - rows_) * panel_bytes_));
  }

  template <DType kType>
  void fill_row(int64_t n, int64_t k, int64_t cols, int64_t padded, Word* words) {
    const uint8_t* p = part_row(source_, first_ + n) + k * dtype_bytes(kType);
    switch (layout_.format) {
      case WeightFormat::kBF16: convert<kType>(p, cols, padded, ToBf16{}, words); break;
      case WeightFormat::kInt8Row:
        sum[n] += convert<kType>(p, cols, padded, ToInt8{_mm_set1_ps(multiplier[n])}, words).sum();
        break;
      case WeightFormat::kInt4Row:
        convert<kType>(p, cols, padded, ToInt4{_mm_set1_ps(multiplier[n])}, words);
        break;
      default: fill_groups<kType>(n, k, cols, p, words);
    }
  }

  template <DType kType>
  void fill_groups(int64_t n, int64_t k, int64_t cols, const uint8_t* p, Word* words) {
    const uint16_t* scales = group_scales_ + n * (layout_.cols / layout_.group);
    const __m128i least = _mm_set1_epi16(source_.weights.search ? -8 : -7);
    for (const int64_t end = k + cols; k < end;) {
      const int64_t run = std::min(end - k, layout_.group - k % layout_.group);
      if (const uint16_t scale = scales[k / layout_.group]; scale != 0)
        convert<kType>(p, run, run, ToInt4Group{_mm_set1_ps(fp16_to_float(scale)), least}, words);
      else
        std::memset(words, kZeroNibbles, size_t(run / 2));
      k += run;
      p += run * dtype_bytes(kType);
      words += run / 8;
    }
  }

  const MatrixLayout& layout_;
  const MatrixSource& source_;
  int64_t first_, rows_;
  const uint16_t* group_scales_;
  int64_t panel_begin_ = 0, panel_bytes_ = 0;
  alignas(16) uint8_t panel_[kTileRows * kMostPanelBytes];
};

// Tiles of each kind: `rows` rows from row `first` of the source on.

void pack_bf16(const MatrixLayout& layout, const MatrixSource& source, int64_t first, int64_t rows,
               uint8_t* dst) {
  if (source.weights.dtype == DType::kBF16) {  // bit for bit
    StoredRows stored({part_row(source, first), source.cols * 2, layout.cols * 2, rows, 0});
    return write_blocks(layout, stored, LaneOrder::kPlain, {}, {}, dst);
  }
  DenseRows lanes(layout, source, first, rows, nullptr);
  write_blocks(layout, lanes, LaneOrder::kPlain, {}, {}, dst);
}

void pack_rows(const MatrixLayout& layout, const MatrixSource& source, int64_t first, int64_t rows,
               uint8_t* dst) {
  const bool int8 = layout.format == WeightFormat::kInt8Row;
  const int limit = int8 ? 127 : 7;
  float scale[kTileRows] = {};
  DenseRows lanes(layout, source, first, rows, nullptr);
  for (int64_t n = 0; n < rows; ++n) {
    const float absmax = row_absmax(source, first + n);
    lanes.multiplier[n] = multiplier_for(absmax, limit);
    scale[n] = lanes.multiplier[n] == 0 ? 0 : absmax / float(limit);
  }
  write_blocks(layout, lanes, LaneOrder::kPlain, {}, {}, dst);
  std::memcpy(dst, scale, sizeof scale);
  if (int8) std::memcpy(dst + sizeof scale, lanes.sum, sizeof lanes.sum);
}

void pack_groups(const MatrixLayout& layout, const MatrixSource& source, int64_t first,
                 int64_t rows, uint16_t* scales, uint8_t* dst) {
  const DType type = source.weights.dtype;
  const int64_t groups = layout.cols / layout.group, group_bytes = layout.group * dtype_bytes(type);
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* p = part_row(source, first + n) + g * group_bytes;
      const uint16_t plain = group_scale(absmax_of(p, type, layout.group));
      scales[n * groups + g] =
          source.weights.search ? search_scale(p, type, layout.group, plain) : plain;
    }
  DenseRows lanes(layout, source, first, rows, scales);
  const auto* bytes = reinterpret_cast<const uint8_t*>(scales);
  write_blocks(layout, lanes, LaneOrder::kPlain, {{bytes, groups * 2, groups * 2, rows, 0}, 2, 1},
               {}, dst);
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

// A group scale of two bytes per row and group.
int64_t dense_scratch(const MatrixLayout& layout) {
  return layout.has_group() ? kTileRows / 2 * (layout.cols / layout.group) : 0;
}

void pack_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                float* scratch, uint8_t* dst) {
  const int64_t rows = tile_rows(layout, tile), first = source.row0 + tile * kTileRows;
  switch (layout.format) {
    case WeightFormat::kBF16: return pack_bf16(layout, source, first, rows, dst);
    case WeightFormat::kInt4Group:
      return pack_groups(layout, source, first, rows, reinterpret_cast<uint16_t*>(scratch), dst);
    default: return pack_rows(layout, source, first, rows, dst);
  }
}

}  // namespace kt
