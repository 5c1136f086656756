#include "quantised.h"

#include <emmintrin.h>

#include <cmath>
#include <cstring>

#include "blocks.h"
#include "scalar.h"

namespace kt {
namespace {

bool has_row_scales(WeightFormat format) {
  return format == WeightFormat::kInt8Row || format == WeightFormat::kInt4Row ||
         format == WeightFormat::kFp8Row;
}

bool has_e4m3(WeightFormat format) {
  return format == WeightFormat::kFp8Block || format == WeightFormat::kFp8Row ||
         format == WeightFormat::kMxFp8;
}

bool has_byte_codes(WeightFormat format) {
  return has_e4m3(format) || format == WeightFormat::kInt8Row;
}

LaneOrder order_of(WeightFormat format) {
  if (format == WeightFormat::kInt8Row) return LaneOrder::kPlain;
  return has_e4m3(format) ? LaneOrder::kPairs : LaneOrder::kNibbles;
}

// The part's codes of `rows` rows from one on. Pads are codes of zero; kInt4Zero has zero points of
// 0 there.
ByteRows codes_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                  int64_t rows) {
  const int64_t per_byte = has_byte_codes(layout.format) ? 1 : 2, stride = source.cols / per_byte;
  const auto* data = static_cast<const uint8_t*>(source.weights.data);
  const bool offset =
      layout.format == WeightFormat::kInt4Group || layout.format == WeightFormat::kInt4Row;
  const uint8_t pad = offset ? 0x88 : 0;
  return {data + row * stride + source.col0 / per_byte, stride, layout.cols / per_byte, rows, pad};
}

int64_t cols_per_scale(const MatrixLayout& layout, const MatrixSource& source) {
  if (has_row_scales(layout.format)) return source.cols;
  switch (layout.format) {
    case WeightFormat::kInt4Group:
    case WeightFormat::kInt4Zero: return layout.group;
    case WeightFormat::kFp8Block: return kFp8BlockSize;
    case WeightFormat::kNvFp4: return 16;
    default: return 32;
  }
}

// The same of values of `size` bytes, one per cols_per_scale.
ByteRows values_of(const void* all, int64_t size, const MatrixLayout& layout,
                   const MatrixSource& source, int64_t row, int64_t rows) {
  const int64_t cols = cols_per_scale(layout, source);
  const int64_t stride = ceil_div(source.cols, cols) * size;
  const bool ue8m0 = layout.format == WeightFormat::kMxFp8 || layout.format == WeightFormat::kMxFp4;
  if (layout.format == WeightFormat::kFp8Block) row /= kFp8BlockSize;
  return {static_cast<const uint8_t*>(all) + row * stride + source.col0 / cols * size, stride,
          ceil_div(layout.cols, cols) * size, rows, uint8_t(ue8m0 ? 127 : 0)};
}

int64_t scale_size(const MatrixLayout& layout) {
  if (layout.has_group()) return layout.scale_bytes();
  return layout.format == WeightFormat::kFp8Block || has_row_scales(layout.format) ? 4 : 1;
}

ByteRows scales_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                   int64_t rows) {
  return values_of(source.weights.scale, scale_size(layout), layout, source, row, rows);
}

ByteRows zeros_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                  int64_t rows) {
  return values_of(source.weights.zero, 1, layout, source, row, rows);
}

// Whether every value of the first row is below `limit`, or `also` where that is not 0.
template <class T> bool all_below(const ByteRows& rows, T limit, T also = 0) {
  T bad = 0;  // of T, so that the loop becomes vectors
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
  switch (layout.format) {
    case WeightFormat::kMxFp8:
    case WeightFormat::kMxFp4:
      return all_below<uint8_t>(scales, 255) ? PackError::kNone : PackError::kBadUe8m0Scale;
    case WeightFormat::kNvFp4:
      return all_below<uint8_t>(scales, 0x7f) ? PackError::kNone : PackError::kBadE4m3Scale;
    case WeightFormat::kInt4Group:
    case WeightFormat::kInt4Zero:
      return all_finite(scales, layout.scale) ? PackError::kNone : PackError::kBadGroupScale;
    default:  // float32, finite and not negative; -0 is a zero like the other
      return all_below<uint32_t>(scales, 0x7f800000, 0x80000000) ? PackError::kNone
                                                                 : PackError::kBadScale;
  }
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
  if (layout.format == WeightFormat::kInt4Zero &&
      !all_below<uint8_t>(zeros_of(layout, source, row, 1), 17))
    return PackError::kBadZero;
  const ByteRows codes = codes_of(layout, source, row, 1);
  if (has_e4m3(layout.format) && has_nan_code(codes.first, codes.bytes)) return PackError::kNanCode;
  return PackError::kNone;
}

void write_head(const MatrixLayout& layout, const void* values, int64_t bytes, uint8_t* tile) {
  std::memset(tile, 0, size_t(layout.head_bytes()));
  std::memcpy(tile, values, size_t(bytes));
}

// After the scales of a kInt8Row tile.
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
  if (layout.format == WeightFormat::kNvFp4 && !(std::isfinite(global) && global >= 0))
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
  switch (layout.format) {
    case WeightFormat::kInt4Zero: zeros = {zeros_of(layout, source, first, rows), 1, 1}; break;
    case WeightFormat::kFp8Block:
      write_head(layout, scale_rows.first, scale_rows.bytes, dst);
      break;
    case WeightFormat::kInt8Row:
    case WeightFormat::kInt4Row:
    case WeightFormat::kFp8Row: write_head(layout, scale_rows.first, rows * 4, dst); break;
    case WeightFormat::kNvFp4: write_head(layout, &source.weights.global, 4, dst); [[fallthrough]];
    case WeightFormat::kMxFp8:
    case WeightFormat::kMxFp4: scales.per_block = 2; break;
    default: break;
  }
  const ByteRows code_rows = codes_of(layout, source, first, rows);
  if (layout.format == WeightFormat::kInt8Row) write_sums(code_rows, dst);
  write_blocks(layout, code_rows, order_of(layout.format), scales, zeros, dst);
}

}  // namespace kt
