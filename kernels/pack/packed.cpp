#include "packed.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>

#include "blocks.h"
#include "scalar.h"

namespace kt {
namespace {

constexpr int64_t kSumsAt = kTileRows * 4;  // in the head, after the scales
constexpr int64_t kChunkBytes = 8 << 10;    // checked, then copied

int64_t blocks_of(const MatrixLayout& layout) { return layout.cols_padded() / layout.block_cols(); }
int64_t body_bytes(const MatrixLayout& layout) { return blocks_of(layout) * layout.block_bytes(); }

// The offset in a tile's head and body where the columns begin.
int64_t head_begin(const MatrixLayout& layout, int64_t col0) {
  return layout.traits().scales.kind == ScaleKind::kBlock ? col0 / kFp8BlockSize * 4 : 0;
}
int64_t body_begin(const MatrixLayout& layout, int64_t col0) {
  return layout.head_bytes() + col0 / layout.block_cols() * layout.block_bytes();
}

// Bytes of the head that are the same in the columns' own tile.
int64_t head_values(const MatrixLayout& layout) {
  switch (layout.traits().scales.kind) {
    case ScaleKind::kRow: return kSumsAt;
    case ScaleKind::kBlock: return ceil_div(layout.cols, kFp8BlockSize) * 4;
    case ScaleKind::kE4m3: return 4;
    default: return 0;
  }
}

// The index of the first bad value of n, or -1. Tests all values, so that the loop is vectorised;
// bad(x) returns a T.
template <class T, class Bad> int64_t first_bad(const uint8_t* p, int64_t n, Bad bad) {
  const auto value = [&](int64_t i) { return load<T>(p + i * int64_t(sizeof(T))); };
  T any = 0;
  for (int64_t i = 0; i < n; ++i) any |= bad(value(i));
  if (!any) return -1;
  int64_t i = 0;
  while (!bad(value(i))) ++i;
  return i;
}

// Finds NaN and infinity by the bits of the exponent.
template <class T> int64_t first_not_finite(const uint8_t* p, int64_t n, T exponent) {
  return first_bad<T>(p, n, [=](T x) { return T(T(x & exponent) == exponent); });
}

// Also finds negative values; -0 counts as zero.
int64_t first_bad_float(const uint8_t* p, int64_t n) {
  return first_bad<uint32_t>(
      p, n, [](uint32_t x) { return uint32_t(x >= 0x7f800000) & uint32_t(x != 0x80000000); });
}

int64_t first_above(const uint8_t* p, int64_t n, uint8_t most) {
  return first_bad<uint8_t>(p, n, [=](uint8_t x) { return uint8_t(x > most); });
}

struct Finding {
  int64_t at;  // index of the value, by rows first; -1 if there is none
  PackError error;
};

Finding bad_in_head(const PackedColumns& from) {
  switch (from.layout.traits().scales.kind) {
    case ScaleKind::kRow:
      if (from.layout.traits().codes.type == CodeType::kE4m3)
        return {first_bad_float(from.head, kTileRows), PackError::kBadScale};
      return {first_not_finite<uint32_t>(from.head, kTileRows, 0x7f800000),
              PackError::kBadSignedScale};
    case ScaleKind::kBlock: {
      const int64_t at = first_bad_float(from.head, head_values(from.layout) / 4);
      return {at < 0 ? at : 0, PackError::kBadScale};
    }
    case ScaleKind::kE4m3: return {first_bad_float(from.head, 1), PackError::kBadGlobal};
    default: return {-1, PackError::kNone};
  }
}

Finding bad_group_scale(const MatrixLayout& layout, const uint8_t* scales) {
  const auto first = [&] {
    switch (layout.scale) {
      case ScaleType::kFP16: return first_not_finite<uint16_t>(scales, kTileRows, 0x7c00);
      case ScaleType::kBF16: return first_not_finite<uint16_t>(scales, kTileRows, 0x7f80);
      default: return first_not_finite<uint32_t>(scales, kTileRows, 0x7f800000);
    }
  };
  return {first(), PackError::kBadSignedScale};
}

// For a block of ggml's formats: checks d and m, then the scales of sub-blocks.
Finding bad_ggml_scale(const MatrixLayout& layout, const uint8_t* scales) {
  const FormatTraits& format = layout.traits();
  const int64_t at = first_not_finite<uint16_t>(scales, format.d_bytes() / 2, 0x7c00);
  if (at >= 0) return {at, PackError::kBadBlockScale};
  if (format.scales.bits != 6) return {-1, PackError::kNone};
  const uint8_t* sub = scales + format.d_bytes();
  const int64_t n = format.scale_bytes - format.d_bytes();
  const auto outside = [](uint8_t x) { return uint8_t(uint8_t(x + 32) > 63); };  // -32 to 31
  return {format.scales.minimum ? first_above(sub, n, 63) : first_bad<uint8_t>(sub, n, outside),
          PackError::kBadSubScale};
}

Finding bad_in_scales(const MatrixLayout& layout, const uint8_t* block) {
  const int64_t bytes = layout.block_scale_bytes();
  switch (layout.traits().scales.kind) {
    case ScaleKind::kGroup: {
      const Finding scale = bad_group_scale(layout, block);
      if (scale.at >= 0 || !layout.traits().scales.zero) return scale;
      const uint8_t* zeros = block + kTileRows * layout.scale_bytes();
      return {first_above(zeros, kTileRows, 16), PackError::kBadZero};
    }
    case ScaleKind::kUe8m0: return {first_above(block, bytes, 254), PackError::kBadUe8m0Scale};
    case ScaleKind::kE4m3: return {first_above(block, bytes, 0x7e), PackError::kBadE4m3Scale};
    case ScaleKind::kGgml: return bad_ggml_scale(layout, block);
    default: return {-1, PackError::kNone};
  }
}

// The lane of the first e4m3 code that is NaN. bytes is a multiple of a step.
int64_t first_nan_lane(const uint8_t* steps, int64_t bytes) {
  const __m128i nan = _mm_set1_epi8(0x7f);
  __m128i found[4] = {};
  for (int64_t i = 0; i < bytes; i += 64)
    for (int v = 0; v < 4; ++v) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(steps + i) + v);
      found[v] = _mm_or_si128(found[v], _mm_cmpeq_epi8(_mm_and_si128(x, nan), nan));
    }
  const __m128i any =
      _mm_or_si128(_mm_or_si128(found[0], found[1]), _mm_or_si128(found[2], found[3]));
  if (!_mm_movemask_epi8(any)) return -1;
  int64_t at = 0;
  while ((steps[at] & 0x7f) != 0x7f) ++at;
  return at / 4;
}

// Adds the codes of each row to its sum.
void add_codes(const uint8_t* steps, int64_t bytes, int32_t* sums) {
  constexpr int kVectors = kStepBytes / 16;
  __m128i pairs[kVectors] = {};  // 64 steps fit into 16 bits
  static_assert(kChunkBytes / kStepBytes <= 64);
  for (const uint8_t* end = steps + bytes; steps < end; steps += kStepBytes)
    for (int v = 0; v < kVectors; ++v) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(steps) + v);
      const __m128i even = _mm_srai_epi16(_mm_slli_epi16(x, 8), 8), odd = _mm_srai_epi16(x, 8);
      pairs[v] = _mm_add_epi16(pairs[v], _mm_add_epi16(even, odd));
    }
  for (int v = 0; v < kVectors; ++v) {
    auto* sum = reinterpret_cast<__m128i*>(sums) + v;
    const __m128i more = _mm_madd_epi16(pairs[v], _mm_set1_epi16(1));
    _mm_storeu_si128(sum, _mm_add_epi32(_mm_loadu_si128(sum), more));
  }
}

// The first error in the scales and codes of some blocks.
Finding bad_in_blocks(const MatrixLayout& layout, const uint8_t* blocks, int64_t bytes) {
  const int64_t scale_bytes = layout.block_scale_bytes(), size = layout.block_bytes();
  const bool e4m3 = layout.traits().codes.type == CodeType::kE4m3;
  if (scale_bytes == 0)
    return e4m3 ? Finding{first_nan_lane(blocks, bytes), PackError::kNanCode}
                : Finding{-1, PackError::kNone};
  for (const uint8_t* b = blocks; b < blocks + bytes; b += size) {
    const Finding bad = bad_in_scales(layout, b);
    if (bad.at >= 0) return bad;
    if (!e4m3) continue;
    const int64_t lane = first_nan_lane(b + scale_bytes, size - scale_bytes);
    if (lane >= 0) return {lane, PackError::kNanCode};
  }
  return {-1, PackError::kNone};
}

}  // namespace

PackedColumns::PackedColumns(const MatrixLayout& whole, const uint8_t* tile, int64_t col0,
                             const MatrixLayout& columns)
    : layout(columns), head(tile + head_begin(whole, col0)), body(tile + body_begin(whole, col0)) {}

PackError take_columns(const PackedColumns& from, uint8_t* dst, int64_t* lane) {
  const MatrixLayout& layout = from.layout;
  const bool has_sums = layout.traits().scales.sums;
  Finding bad = bad_in_head(from);
  alignas(16) int32_t sums[kTileRows] = {};
  uint8_t* to = dst + layout.head_bytes();
  const int64_t all = body_bytes(layout), size = layout.block_bytes();
  // Copies each chunk right after checking it, while it is in the L1 cache.
  const int64_t chunk = std::max<int64_t>(1, kChunkBytes / size) * size;
  for (int64_t i = 0; i < all && bad.at < 0; i += chunk) {
    const int64_t bytes = std::min(chunk, all - i);
    bad = bad_in_blocks(layout, from.body + i, bytes);
    if (has_sums) add_codes(from.body + i, bytes, sums);
    stream_bytes(from.body + i, bytes, to + i);
  }
  stream_fence();
  *lane = bad.at % kTileRows;
  if (bad.at >= 0) return bad.error;
  std::memset(dst, 0, size_t(layout.head_bytes()));
  std::memcpy(dst, from.head, size_t(head_values(layout)));
  if (has_sums) std::memcpy(dst + kSumsAt, sums, sizeof sums);
  return PackError::kNone;
}

void put_columns(const MatrixLayout& columns, const uint8_t* tile, const MatrixLayout& whole,
                 int64_t col0, uint8_t* dst) {
  std::memcpy(dst + head_begin(whole, col0), tile, size_t(head_values(columns)));
  if (columns.traits().scales.sums)
    for (int64_t n = 0; n < kTileRows; ++n) {
      const int32_t sum =
          load<int32_t>(dst + kSumsAt + n * 4) + load<int32_t>(tile + kSumsAt + n * 4);
      std::memcpy(dst + kSumsAt + n * 4, &sum, 4);
    }
  std::memcpy(dst + body_begin(whole, col0), tile + columns.head_bytes(),
              size_t(body_bytes(columns)));
}

}  // namespace kt
