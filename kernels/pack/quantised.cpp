#include "quantised.h"

#include <emmintrin.h>

#include <cmath>
#include <cstring>

#include "blocks.h"
#include "scalar.h"

namespace kt {
namespace {

bool has_e4m3(const MatrixLayout& layout) { return layout.traits().codes.type == CodeType::kE4m3; }

ScaleKind scales_in(const MatrixLayout& layout) { return layout.traits().scales.kind; }

LaneOrder order_of(const MatrixLayout& layout) {
  if (layout.code_bits() == 4) return LaneOrder::kNibbles;
  return has_e4m3(layout) ? LaneOrder::kPairs : LaneOrder::kPlain;
}

// The part's codes of `rows` rows starting at `row`. Padding has codes of value zero or, with zero
// points, codes of 0.
ByteRows codes_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                  int64_t rows) {
  const int64_t per_byte = 8 / layout.code_bits(), stride = source.cols / per_byte;
  const auto* data = static_cast<const uint8_t*>(source.weights.data);
  const int offset = layout.traits().codes.offset;
  const auto pad = uint8_t(offset | offset << 4);  // an offset means nibbles
  return {data + row * stride + source.col0 / per_byte, stride, layout.cols / per_byte, rows, pad};
}

int64_t cols_per_scale(const MatrixLayout& layout, const MatrixSource& source) {
  switch (scales_in(layout)) {
    case ScaleKind::kRow: return source.cols;
    case ScaleKind::kBlock: return kFp8BlockSize;
    case ScaleKind::kGroup: return layout.group;
    default: return layout.traits().scales.cols;
  }
}

// The part's values of `size` bytes, one per cols_per_scale.
ByteRows values_of(const void* all, int64_t size, const MatrixLayout& layout,
                   const MatrixSource& source, int64_t row, int64_t rows) {
  const int64_t cols = cols_per_scale(layout, source);
  const int64_t stride = ceil_div(source.cols, cols) * size;
  const bool ue8m0 = scales_in(layout) == ScaleKind::kUe8m0;
  if (scales_in(layout) == ScaleKind::kBlock) row /= kFp8BlockSize;
  return {static_cast<const uint8_t*>(all) + row * stride + source.col0 / cols * size, stride,
          ceil_div(layout.cols, cols) * size, rows, uint8_t(ue8m0 ? 127 : 0)};
}

int64_t scale_size(const MatrixLayout& layout) {
  if (layout.has_group()) return layout.scale_bytes();
  return scales_in(layout) == ScaleKind::kRow || scales_in(layout) == ScaleKind::kBlock ? 4 : 1;
}

ByteRows scales_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                   int64_t rows) {
  return values_of(source.weights.scale, scale_size(layout), layout, source, row, rows);
}

ByteRows zeros_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                  int64_t rows) {
  return values_of(source.weights.zero, 1, layout, source, row, rows);
}

// Whether every value of the first row is below `limit` or, if `also` is not 0, equal to it.
template <class T> bool all_below(const ByteRows& rows, T limit, T also = 0) {
  T bad = 0;  // a T, so that the loop is vectorised
  for (int64_t i = 0; i < rows.bytes; i += int64_t(sizeof(T))) {
    const T x = load<T>(rows.first + i);
    bad |= T(T(x >= limit) & T(x != also));
  }
  return bad == 0;
}

// Whether every value of the first row is finite, by its exponent's bits.
template <class T> bool all_finite(const ByteRows& rows, T exponent) {
  T bad = 0;
  for (int64_t i = 0; i < rows.bytes; i += int64_t(sizeof(T))) {
    const T x = load<T>(rows.first + i);
    bad |= T(T(x & exponent) == exponent);
  }
  return bad == 0;
}

bool all_finite(const ByteRows& rows, ScaleType type) {
  switch (type) {
    case ScaleType::kFP16: return all_finite<uint16_t>(rows, 0x7c00);
    case ScaleType::kBF16: return all_finite<uint16_t>(rows, 0x7f80);
    default: return all_finite<uint32_t>(rows, 0x7f800000);
  }
}

PackError check_scales(const MatrixLayout& layout, const MatrixSource& source, int64_t row) {
  const ByteRows scales = scales_of(layout, source, row, 1);
  switch (scales_in(layout)) {
    case ScaleKind::kUe8m0:
      return all_below<uint8_t>(scales, 255) ? PackError::kNone : PackError::kBadUe8m0Scale;
    case ScaleKind::kE4m3:
      return all_below<uint8_t>(scales, 0x7f) ? PackError::kNone : PackError::kBadE4m3Scale;
    case ScaleKind::kRow:
      if (has_e4m3(layout)) break;
      return all_finite(scales, ScaleType::kFP32) ? PackError::kNone : PackError::kBadSignedScale;
    case ScaleKind::kGroup:
      return all_finite(scales, layout.scale) ? PackError::kNone : PackError::kBadSignedScale;
    default: break;
  }
  // float32, finite and not negative; -0 counts as zero
  return all_below<uint32_t>(scales, 0x7f800000, 0x80000000) ? PackError::kNone
                                                             : PackError::kBadScale;
}

bool has_nan_code(const uint8_t* codes, int64_t n) {
  const __m128i nan = _mm_set1_epi8(0x7f);
  __m128i found = _mm_setzero_si128();
  int64_t k = 0;
  for (; k + 16 <= n; k += 16) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + k));
    found = _mm_or_si128(found, _mm_cmpeq_epi8(_mm_and_si128(x, nan), nan));
  }
  bool any = _mm_movemask_epi8(found) != 0;
  for (; k < n; ++k) any |= (codes[k] & 0x7f) == 0x7f;
  return any;
}

PackError check_row(const MatrixLayout& layout, const MatrixSource& source, int64_t row) {
  if (const PackError e = check_scales(layout, source, row); e != PackError::kNone) return e;
  if (layout.traits().scales.zero && !all_below<uint8_t>(zeros_of(layout, source, row, 1), 17))
    return PackError::kBadZero;
  const ByteRows codes = codes_of(layout, source, row, 1);
  if (has_e4m3(layout) && has_nan_code(codes.first, codes.bytes)) return PackError::kNanCode;
  return PackError::kNone;
}

void write_head(const MatrixLayout& layout, const void* values, int64_t bytes, uint8_t* tile) {
  std::memset(tile, 0, size_t(layout.head_bytes()));
  std::memcpy(tile, values, size_t(bytes));
}

// Writes the sums after the scales of a tile.
void write_sums(const ByteRows& codes, uint8_t* tile) {
  int32_t sums[kTileRows] = {};
  for (int64_t n = 0; n < codes.count; ++n) {
    const auto* row = reinterpret_cast<const int8_t*>(codes.first + n * codes.stride);
    for (int64_t k = 0; k < codes.bytes; ++k) sums[n] += row[k];
  }
  std::memcpy(tile + kTileRows * 4, sums, sizeof sums);
}

}  // namespace

PackError check_quantised(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                          int64_t* bad_row) {
  const float global = source.weights.global;
  if (scales_in(layout) == ScaleKind::kE4m3 && !(std::isfinite(global) && global >= 0))
    return PackError::kBadGlobal;
  const int64_t first = source.row0 + tile * kTileRows;
  for (int64_t row = first; row < first + tile_rows(layout, tile); ++row) {
    *bad_row = row;
    if (const PackError e = check_row(layout, source, row); e != PackError::kNone) return e;
  }
  return PackError::kNone;
}

void pack_quantised(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                    uint8_t* dst) {
  const int64_t first = source.row0 + tile * kTileRows, rows = tile_rows(layout, tile);
  const ByteRows scale_rows = scales_of(layout, source, first, rows);
  BlockValues scales{scale_rows, scale_size(layout), 1}, zeros{};
  const FormatTraits::Scales& kept = layout.traits().scales;
  switch (kept.kind) {
    case ScaleKind::kRow: write_head(layout, scale_rows.first, rows * 4, dst); break;
    case ScaleKind::kBlock: write_head(layout, scale_rows.first, scale_rows.bytes, dst); break;
    case ScaleKind::kE4m3: write_head(layout, &source.weights.global, 4, dst); break;
    default: break;
  }
  if (kept.cols) scales.per_block = layout.block_cols() / kept.cols;
  if (kept.zero) zeros = {zeros_of(layout, source, first, rows), 1, 1};
  const ByteRows code_rows = codes_of(layout, source, first, rows);
  if (kept.sums) write_sums(code_rows, dst);
  write_blocks(layout, code_rows, order_of(layout), scales, zeros, dst);
}

}  // namespace kt
