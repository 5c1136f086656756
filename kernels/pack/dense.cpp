#include "dense.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "blocks.h"
#include "scalar.h"
#include "scale_search.h"
#include "sixteen.h"

namespace kt {
namespace {

// Lane s of a row: the row's four bytes of step s (kt/format.h).
using Word = uint32_t;
constexpr uint8_t kZeroNibbles = 0x88;  // u = q + 8

const uint8_t* source_row(const MatrixSource& source, int64_t row) {
  return static_cast<const uint8_t*>(source.weights.data) +
         row * source.cols * dtype_bytes(source.weights.dtype);
}

// The first of the part's columns in a row.
const uint8_t* part_row(const MatrixSource& source, int64_t row) {
  return source_row(source, row) + source.col0 * dtype_bytes(source.weights.dtype);
}

template <class F> auto with_dtype(DType type, F f) {
  switch (type) {
    case DType::kBF16: return f.template operator()<DType::kBF16>();
    case DType::kFP16: return f.template operator()<DType::kFP16>();
    default: return f.template operator()<DType::kFP32>();
  }
}

// The largest magnitude of a row; infinite if a weight is not finite.
template <DType kType> float row_absmax(const MatrixSource& source, int64_t row) {
  const uint32_t bits = most_of<kType>(source_row(source, row), source.cols);
  return bits >= kBeyondFinite<kType> ? INFINITY : load_float(&bits, kType, 0);
}

// limit / absmax, or 0 if that is not finite: the row is zero or too small to represent. This is
// the rule for activations, too (isa/act_quant.inl).
float multiplier_for(float absmax, int limit) {
  const float m = float(limit) / absmax;
  return std::isfinite(m) ? m : 0.0f;
}

// absmax / limit, or just below it if rounding would make the row's largest weight infinite.
float row_scale(float absmax, int limit) {
  const float scale = absmax / float(limit);
  return std::isfinite(scale * float(limit)) ? scale : std::nextafter(scale, 0.0f);
}

// The conversions of 32 weights.

// rint as int16: to nearest, ties to even, as in the kernels.
__m256i rounded(__m256 even, __m256 odd) {
  return _mm256_packs_epi32(_mm256_cvtps_epi32(even), _mm256_cvtps_epi32(odd));
}

// 32 int16 as bytes, in the order [0, 8) [16, 24) [8, 16) [24, 32).
__m256i to_bytes(__m256i low, __m256i high) { return _mm256_packs_epi16(low, high); }

void store_words(__m256i x, Word* words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), x);
}

// Bytes of -8 to 7, in the order of to_bytes, as nibbles u = q + 8. Of each eight, the first four
// become the low nibbles.
void store_nibbles(__m256i q, Word* words) {
  const __m256i u = _mm256_add_epi8(q, _mm256_set1_epi8(8));
  const __m256i pairs = _mm256_or_si256(u, _mm256_srli_epi64(u, 28));
  const __m256i first = _mm256_setr_epi32(0, 4, 2, 6, 0, 0, 0, 0);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(words),
                   _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(pairs, first)));
}

struct ToBf16 {
  static constexpr int64_t kWords = 16;
  void operator()(const Sixteen& x, const Sixteen& y, Word* words) {
    store_words(_mm256_packs_epi32(to_bf16(x.even), to_bf16(x.odd)), words);
    store_words(_mm256_packs_epi32(to_bf16(y.even), to_bf16(y.odd)), words + 8);
  }
};

// A row's values times its multiplier round to at most the limit.
struct Multiply {
  __m256 multiplier;
  explicit Multiply(float of_row) : multiplier(_mm256_set1_ps(of_row)) {}
  __m256i operator()(const Sixteen& x) const {
    return rounded(_mm256_mul_ps(x.even, multiplier), _mm256_mul_ps(x.odd, multiplier));
  }
};

struct ToInt8 {
  static constexpr int64_t kWords = 8;
  Multiply multiply;
  __m256i sums = _mm256_setzero_si256();
  void operator()(const Sixteen& x, const Sixteen& y, Word* words) {
    const __m256i low = multiply(x), high = multiply(y);
    sums = _mm256_add_epi32(sums,
                            _mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1)));
    store_words(_mm256_permute4x64_epi64(to_bytes(low, high), 0xd8), words);  // 0, 2, 1, 3
  }
  int32_t sum() const {
    int32_t lane[8], total = 0;
    std::memcpy(lane, &sums, sizeof lane);
    for (int32_t x : lane) total += x;
    return total;
  }
};

struct ToInt4 {
  static constexpr int64_t kWords = 4;
  Multiply multiply;
  void operator()(const Sixteen& x, const Sixteen& y, Word* words) {
    store_nibbles(to_bytes(multiply(x), multiply(y)), words);
  }
};

// Divides by the fp16 scale, which is not exactly absmax / 7. A scale that was rounded down or
// searched gives values beyond the codes, which are clamped. Multiplying by the reciprocal is
// faster than dividing. Product and quotient differ by less than kTieMargin wherever they round to
// a code, so they round alike except near a tie, where this divides.
struct ToInt4Group {
  static constexpr int64_t kWords = 4;
  __m256 scale, reciprocal;
  __m256i least;
  ToInt4Group(float of_group, int8_t least_code)
      : scale(_mm256_set1_ps(of_group)),
        reciprocal(_mm256_set1_ps(1.0f / of_group)),
        least(_mm256_set1_epi8(least_code)) {}

  void operator()(const Sixteen& x, const Sixteen& y, Word* words) {
    const __m256 w[4] = {x.even, x.odd, y.even, y.odd};
    __m256i q[4];
    __m256 off = _mm256_setzero_ps();  // the largest change by rounding
    for (int i = 0; i < 4; ++i) {
      const __m256 product = _mm256_mul_ps(w[i], reciprocal);
      q[i] = _mm256_cvtps_epi32(product);
      const __m256 change = _mm256_sub_ps(product, _mm256_cvtepi32_ps(q[i]));
      off = _mm256_max_ps(off, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), change));
    }
    const __m256 tie = _mm256_set1_ps(0.5f - kTieMargin);
    if (_mm256_movemask_ps(_mm256_cmp_ps(off, tie, _CMP_GT_OQ))) [[unlikely]]
      for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_div_ps(w[i], scale));
    const __m256i all = to_bytes(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    store_nibbles(_mm256_max_epi8(least, _mm256_min_epi8(_mm256_set1_epi8(7), all)), words);
  }

 private:
  // The relative difference of product and quotient is at most 1.5 * 2^-23. The last tie is 8.5.
  static constexpr float kTieMargin = 0x1p-19f;
};

// Writes the words of n columns, then zeros up to `padded`; both count from p. Prefetches what lies
// `ahead` bytes further. Returns `to` with its sums: taking it by value keeps it in registers.
template <DType kType, class To>
To convert(const uint8_t* p, int64_t n, int64_t padded, int64_t ahead, To to, Word* words) {
  constexpr int64_t kBytes = 32 * dtype_bytes(kType);
  int64_t k = 0;
  for (; k + 32 <= n; k += 32, p += kBytes, words += To::kWords) {
    for (int64_t line = 0; line < kBytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(p + ahead + line), _MM_HINT_T0);
    to(load_sixteen<kType>(p), load_sixteen<kType>(p + kBytes / 2), words);
  }
  for (; k < padded; k += 32, words += To::kWords) {
    uint8_t room[kBytes] = {};
    if (k < n) std::memcpy(room, p, size_t((n - k) * dtype_bytes(kType)));
    to(load_sixteen<kType>(room), load_sixteen<kType>(room + kBytes / 2), words);
  }
  return to;
}

// Whether weights are copied unchanged, which needs no scratch.
bool is_copied(const MatrixLayout& layout, DType type) {
  return layout.format == WeightFormat::kBF16 && type == DType::kBF16;
}

int64_t lane_words(const MatrixLayout& layout) { return layout.cols_padded() / layout.step_cols(); }

// Builds the lanes of a tile row by row. Each row is read from memory once, while the previous row
// is processed.
template <DType kType> class DenseTile {
 public:
  // scratch: [32, lane_words], then for kInt4Group two bytes per row and group.
  DenseTile(const MatrixLayout& layout, const MatrixSource& source, float* scratch)
      : layout_(layout),
        source_(source),
        lanes_(reinterpret_cast<Word*>(scratch)),
        group_scales_(reinterpret_cast<uint16_t*>(scratch + kTileRows * lane_words(layout))) {}

  // Stops at the first row that cannot be packed.
  PackError pack(int64_t first, int64_t rows, uint8_t* dst, int64_t* bad_row) {
    const int64_t words = lane_words(layout_);
    for (int64_t n = 0; n < rows; ++n) {
      ahead_ = n + 1 < rows ? source_.cols * dtype_bytes(kType) : 0;
      if (const PackError error = row(first + n, n); error != PackError::kNone)
        return *bad_row = first + n, error;
    }
    std::memset(lanes_ + rows * words, layout_.code_bits() == 4 ? kZeroNibbles : 0,
                size_t((kTileRows - rows) * words * 4));
    const auto* lanes = reinterpret_cast<const uint8_t*>(lanes_);
    BlockValues scales{};
    if (layout_.has_group()) {
      const int64_t bytes = groups() * 2;
      scales = {{reinterpret_cast<const uint8_t*>(group_scales_), bytes, bytes, rows, 0}, 2, 1};
    }
    write_blocks(layout_, {lanes, words * 4, words * 4, kTileRows, 0}, LaneOrder::kPlain, scales,
                 {}, dst);
    if (layout_.head_bytes()) std::memcpy(dst, &head_, size_t(layout_.head_bytes()));
    return PackError::kNone;
  }

 private:
  int64_t groups() const { return layout_.cols / layout_.group; }

  PackError row(int64_t row, int64_t n) {
    const uint8_t* p = part_row(source_, row);
    Word* words = lanes_ + n * lane_words(layout_);
    const auto all = [&](auto to) {
      return convert<kType>(p, layout_.cols, layout_.cols_padded(), ahead_, to, words);
    };
    switch (layout_.traits().scales.kind) {
      case ScaleKind::kNone: all(ToBf16{}); return PackError::kNone;
      case ScaleKind::kGroup: return groups_of_row(p, n, words);
      default: break;
    }
    const int limit = layout_.code_bits() == 8 ? 127 : 7;
    const float absmax = row_absmax<kType>(source_, row);
    if (!std::isfinite(absmax)) return PackError::kNotFinite;
    const float multiplier = multiplier_for(absmax, limit);
    head_.scale[n] = multiplier == 0 ? 0 : row_scale(absmax, limit);
    if (limit == 127)
      head_.sum[n] = all(ToInt8{Multiply(multiplier)}).sum();
    else
      all(ToInt4{Multiply(multiplier)});
    return PackError::kNone;
  }

  PackError groups_of_row(const uint8_t* p, int64_t n, Word* words) {
    const bool search = source_.weights.search;
    const int64_t group = layout_.group, bytes = group * dtype_bytes(kType);
    uint16_t* scales = group_scales_ + n * groups();
    if (const PackError error = find_scales(p, scales); error != PackError::kNone) return error;
    for (int64_t g = 0; g < groups(); ++g, p += bytes, words += group / 8) {
      if (search) scales[g] = search_scale(p, kType, group, scales[g]);
      if (scales[g] != 0)
        convert<kType>(p, group, group, ahead_, ToInt4Group(_cvtsh_ss(scales[g]), search ? -8 : -7),
                       words);
      else
        std::memset(words, kZeroNibbles, size_t(group / 2));
    }
    return PackError::kNone;
  }

  // fp16(absmax / 7) of a row's groups.
  PackError find_scales(const uint8_t* p, uint16_t* scales) const {
    const __m128i infinite = _mm_set1_epi16(0x7c00);
    for (int64_t g = 0; g < groups(); g += 8) {
      const int64_t here = std::min<int64_t>(8, groups() - g);
      uint32_t bits[8] = {}, most = 0;
      for (int64_t i = 0; i < here; ++i, p += layout_.group * dtype_bytes(kType)) {
        bits[i] = most_of<kType>(p, layout_.group);
        most = std::max(most, bits[i]);
      }
      if (most >= kBeyondFinite<kType>) return PackError::kNotFinite;
      const __m256 quotient = _mm256_div_ps(magnitudes<kType>(bits), _mm256_set1_ps(7.0f));
      const __m128i eight = _mm256_cvtps_ph(quotient, _MM_FROUND_TO_NEAREST_INT);
      if (_mm_movemask_epi8(_mm_cmpeq_epi16(eight, infinite))) return PackError::kScaleOverflow;
      std::memcpy(scales + g, &eight, size_t(here * 2));
    }
    return PackError::kNone;
  }

  const MatrixLayout& layout_;
  const MatrixSource& source_;
  Word* lanes_;
  uint16_t* group_scales_;
  int64_t ahead_ = 0;  // bytes to the row that comes next
  struct {             // of kInt8Row; kInt4Row uses the scales
    float scale[kTileRows];
    int32_t sum[kTileRows];
  } head_{};
};

}  // namespace

PackError check_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                      int64_t* bad_row) {
  if (layout.traits().scales.kind == ScaleKind::kNone) return PackError::kNone;
  for (int64_t n = 0; n < tile_rows(layout, tile); ++n) {
    const int64_t row = *bad_row = source.row0 + tile * kTileRows + n;
    const float absmax = with_dtype(source.weights.dtype,
                                    [&]<DType kType>() { return row_absmax<kType>(source, row); });
    if (!std::isfinite(absmax)) return PackError::kNotFinite;
    if (layout.has_group() && float_to_fp16(absmax / 7.0f) == 0x7c00)
      return PackError::kScaleOverflow;  // in the group that has the row's largest weight
  }
  return PackError::kNone;
}

int64_t dense_scratch(const MatrixLayout& layout, DType type) {
  if (is_copied(layout, type)) return 0;
  const int64_t halves = layout.has_group() ? kTileRows * (layout.cols / layout.group) : 0;
  return kTileRows * lane_words(layout) + halves / 2;
}

PackError pack_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     float* scratch, uint8_t* dst, int64_t* bad_row) {
  const int64_t rows = tile_rows(layout, tile), first = source.row0 + tile * kTileRows;
  if (is_copied(layout, source.weights.dtype)) {
    const ByteRows lanes{part_row(source, first), source.cols * 2, layout.cols * 2, rows, 0};
    write_blocks(layout, lanes, LaneOrder::kPlain, {}, {}, dst);
    return PackError::kNone;
  }
  return with_dtype(source.weights.dtype, [&]<DType kType>() {
    return DenseTile<kType>(layout, source, scratch).pack(first, rows, dst, bad_row);
  });
}

}  // namespace kt
