// Packed tiles according to kt/format.h: which bytes are valid, and what they are once loaded.
#pragma once
#include "input.h"
#include "reference.h"

namespace fuzz {

// Converts a loaded tile to the form in which it is saved: heads with zeros after their values, and
// the sums computed from the int8 codes.
inline void as_saved(const kt::MatrixLayout& layout, uint8_t* tile) {
  const int64_t head = layout.head_bytes();
  const auto zeros_from = [&](int64_t at) { std::memset(tile + at, 0, size_t(head - at)); };
  if (layout.format == kt::WeightFormat::kFp8Block) zeros_from((layout.cols + 127) / 128 * 4);
  if (layout.format == kt::WeightFormat::kNvFp4) zeros_from(4);
  if (layout.format != kt::WeightFormat::kInt8Row) return;
  for (int64_t n = 0; n < 32; ++n) {
    int32_t sum = 0;
    for (int64_t k = 0; k < layout.cols_padded(); ++k)
      sum += int8_t(tile[head + k / 4 * 128 + n * 4 + k % 4]);
    std::memcpy(tile + 128 + n * 4, &sum, 4);
  }
}

// Whether all scales and codes of a tile, including padding, are in their ranges.
inline bool good_tile(const kt::MatrixLayout& layout, const uint8_t* tile) {
  using F = kt::WeightFormat;
  const bool integer_rows = layout.format == F::kInt8Row || layout.format == F::kInt4Row;
  const auto good_scale = [&](int64_t i) {
    const double x = float_at(tile, DType::kFP32, i);
    return std::isfinite(x) && (x >= 0 || integer_rows);
  };
  const bool row_scales = integer_rows || layout.format == F::kFp8Row;
  const int64_t floats = row_scales                      ? 32
                         : layout.format == F::kFp8Block ? (layout.cols + 127) / 128
                         : layout.format == F::kNvFp4    ? 1
                                                         : 0;
  for (int64_t i = 0; i < floats; ++i)
    if (!good_scale(i)) return false;
  const uint8_t* b = tile + layout.head_bytes();
  const bool e4m3_codes =
      layout.format == F::kFp8Block || layout.format == F::kFp8Row || layout.format == F::kMxFp8;
  const int64_t scale_bytes = layout.block_scale_bytes(), size = layout.block_bytes();
  for (int64_t k = 0; k < layout.cols_padded(); k += layout.block_cols(), b += size) {
    for (int64_t i = scale_bytes; i < size && e4m3_codes; ++i)
      if ((b[i] & 127) == 127) return false;
    for (int64_t n = 0; n < 32 && layout.has_group(); ++n)
      if (!finite_at(b, layout.scale, n)) return false;
    const int64_t most = layout.format == F::kMxFp8 || layout.format == F::kMxFp4 ? 254
                         : layout.format == F::kNvFp4                             ? 126
                                                                                  : 255;
    for (int64_t i = 0; i < 64 && most < 255; ++i)
      if (b[i] > most) return false;
    for (int64_t n = 0; n < 32 && layout.format == F::kInt4Zero; ++n)
      if (b[32 * layout.scale_bytes() + n] > 16) return false;
    if (!kt::is_ggml(layout.format)) continue;
    const int64_t d_bytes = layout.traits().d_bytes();
    for (int64_t i = 0; i < d_bytes / 2; ++i)
      if (!finite_at(b, ScaleType::kFP16, i)) return false;
    for (int64_t i = d_bytes; i < scale_bytes; ++i) {
      const int x = int8_t(b[i]);
      if ((layout.format == F::kQ4K || layout.format == F::kQ5K) && (x < 0 || x > 63)) return false;
      if ((layout.format == F::kQ3K || layout.format == F::kIQ4XS) && (x < -32 || x > 31))
        return false;
    }
  }
  return true;
}

}  // namespace fuzz
