#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "scalar.h"

namespace kt {
namespace {

// The tile's source rows as floats, [32][cols padded], zero outside the matrix part.
struct TileFloats {
  float* value;
  int64_t rows, stride;
  const float* row(int64_t n) const { return value + n * stride; }
};

int64_t rows_of(const MatrixLayout& layout, int64_t tile) {
  return std::min(kTileRows, layout.rows - tile * kTileRows);
}

TileFloats load_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     float* scratch) {
  const TileFloats t{scratch, rows_of(layout, tile), layout.cols_padded()};
  std::fill_n(t.value, kTileRows * t.stride, 0.0f);
  for (int64_t n = 0; n < t.rows; ++n) {
    const int64_t at = (source.row0 + tile * kTileRows + n) * source.cols + source.col0;
    for (int64_t k = 0; k < layout.cols; ++k)
      t.value[n * t.stride + k] = load_float(source.data, source.dtype, at + k);
  }
  return t;
}

// absmax of columns [begin, end) of a row of the whole source matrix; infinite when not finite.
float source_absmax(const MatrixSource& source, int64_t row, int64_t begin, int64_t end) {
  float most = 0;
  for (int64_t k = begin; k < end; ++k) {
    const float x = std::fabs(load_float(source.data, source.dtype, row * source.cols + k));
    if (!std::isfinite(x)) return INFINITY;
    most = std::max(most, x);
  }
  return most;
}

int quantise(float x, float multiplier, int limit) {
  return std::clamp(int(std::rint(x * multiplier)), -limit, limit);
}

// limit / absmax where it is finite, else 0: the row is zero or too small to represent. The same
// rule as for activations (isa/act_quant.inl).
float multiplier_for(float absmax, int limit) {
  const float m = float(limit) / absmax;
  return std::isfinite(m) ? m : 0.0f;
}

// Eight nibbles of one lane: u = q + 8, columns k..k+3 low, k+4..k+7 high.
void put_nibbles(const int* q, uint8_t* lane) {
  for (int b = 0; b < 4; ++b) lane[b] = uint8_t((q[b] + 8) | (q[b + 4] + 8) << 4);
}

void pack_bf16(const MatrixLayout& layout, const TileFloats& t, uint8_t* dst) {
  for (int64_t k = 0; k < layout.cols_padded(); k += 2, dst += kStepBytes)
    for (int64_t n = 0; n < kTileRows; ++n) {
      const uint16_t pair[2] = {float_to_bf16(t.row(n)[k]), float_to_bf16(t.row(n)[k + 1])};
      std::memcpy(dst + n * 4, pair, 4);
    }
}

void pack_rows(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
               const TileFloats& t, uint8_t* dst) {
  const bool int8 = layout.format == WeightFormat::kInt8Row;
  const int limit = int8 ? 127 : 7;
  float scale[kTileRows] = {}, multiplier[kTileRows] = {};
  for (int64_t n = 0; n < t.rows; ++n) {
    const int64_t row = source.row0 + tile * kTileRows + n;
    const float absmax = source_absmax(source, row, 0, source.cols);
    multiplier[n] = multiplier_for(absmax, limit);
    scale[n] = multiplier[n] == 0 ? 0 : absmax / float(limit);
  }
  std::memcpy(dst, scale, sizeof scale);
  uint8_t* steps = dst + layout.head_bytes();
  const int64_t per_step = int8 ? 4 : 8;
  int32_t sum[kTileRows] = {};
  for (int64_t k = 0; k < layout.cols_padded(); k += per_step, steps += kStepBytes)
    for (int64_t n = 0; n < kTileRows; ++n) {
      int q[8];
      for (int64_t b = 0; b < per_step; ++b)
        sum[n] += q[b] = quantise(t.row(n)[k + b], multiplier[n], limit);
      if (int8)
        for (int b = 0; b < 4; ++b) steps[n * 4 + b] = uint8_t(int8_t(q[b]));
      else
        put_nibbles(q, steps + n * 4);
    }
  if (int8) std::memcpy(dst + sizeof scale, sum, sizeof sum);
}

uint16_t group_scale(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                     int64_t k0) {
  const int64_t begin = source.col0 + k0;
  return float_to_fp16(source_absmax(source, row, begin, begin + layout.group) / 7.0f);
}

void pack_groups(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                 const TileFloats& t, uint8_t* dst) {
  for (int64_t k0 = 0; k0 < layout.cols_padded(); k0 += layout.group) {
    uint16_t scale[kTileRows] = {};
    for (int64_t n = 0; n < t.rows; ++n)
      scale[n] = group_scale(layout, source, source.row0 + tile * kTileRows + n, k0);
    std::memcpy(dst, scale, sizeof scale);
    dst += sizeof scale;
    for (int64_t k = k0; k < k0 + layout.group; k += 8, dst += kStepBytes)
      for (int64_t n = 0; n < kTileRows; ++n) {
        const float s = fp16_to_float(scale[n]);
        int q[8];
        for (int b = 0; b < 8; ++b)
          q[b] = s == 0 ? 0 : int(std::clamp(std::rint(t.row(n)[k + b] / s), -7.0f, 7.0f));
        put_nibbles(q, dst + n * 4);
      }
  }
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
    if (!std::isfinite(source_absmax(source, row, 0, source.cols))) return PackError::kNotFinite;
    if (layout.format != WeightFormat::kInt4Group) continue;
    for (int64_t k0 = 0; k0 < layout.cols_padded(); k0 += layout.group)
      if (group_scale(layout, source, row, k0) == 0x7c00) return PackError::kScaleOverflow;
  }
  return PackError::kNone;
}

int64_t pack_scratch(const MatrixLayout& layout) { return kTileRows * layout.cols_padded(); }

void pack_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile, float* scratch,
               uint8_t* dst) {
  const TileFloats t = load_tile(layout, source, tile, scratch);
  switch (layout.format) {
    case WeightFormat::kBF16: return pack_bf16(layout, t, dst);
    case WeightFormat::kInt4Group: return pack_groups(layout, source, tile, t, dst);
    default: return pack_rows(layout, source, tile, t, dst);
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
              tile + k / layout.group * (2 * kTileRows + layout.group / 8 * kStepBytes);
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
