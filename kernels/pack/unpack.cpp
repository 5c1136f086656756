#include "ggml.h"
#include "pack.h"
#include "scalar.h"

namespace kt {
namespace {

// One packed tile of a matrix.
struct Tile {
  const MatrixLayout& layout;
  const uint8_t* bytes;

  const uint8_t* block(int64_t k) const {
    return bytes + layout.head_bytes() + k / layout.block_cols() * layout.block_bytes();
  }

  // The lane of row n in the step that holds column k.
  const uint8_t* lane(int64_t n, int64_t k) const {
    const int64_t step = k % layout.block_cols() / layout.step_cols();
    return block(k) + layout.block_scale_bytes() + step * kStepBytes + n * 4;
  }

  uint8_t code4(int64_t n, int64_t k) const { return lane(n, k)[k & 3] >> (k & 4) & 15; }

  uint8_t e4m3(int64_t n, int64_t k) const {
    const int64_t place[] = {0, 2, 1, 3};
    return lane(n, k)[place[k & 3]];
  }

  float row_scale(int64_t n) const { return load<float>(bytes + n * 4); }

  float group_scale(int64_t n, int64_t k) const {
    const uint8_t* p = block(k) + n * layout.scale_bytes();
    switch (layout.scale) {
      case ScaleType::kFP16: return fp16_to_float(load<uint16_t>(p));
      case ScaleType::kBF16: return bf16_to_float(load<uint16_t>(p));
      default: return load<float>(p);
    }
  }

  // A scale of one byte; half a block's columns share one.
  uint8_t half_scale(int64_t n, int64_t k) const {
    const int64_t half = k % layout.block_cols() / (layout.block_cols() / 2);
    return block(k)[half * kTileRows + n];
  }

  // W[n, k], in at most one rounding.
  float weight(int64_t n, int64_t k) const {
    switch (layout.format) {
      case WeightFormat::kBF16: return bf16_to_float(load<uint16_t>(lane(n, k) + k % 2 * 2));
      case WeightFormat::kInt8Row: return float(int8_t(lane(n, k)[k % 4])) * row_scale(n);
      case WeightFormat::kInt4Row: return float(code4(n, k) - 8) * row_scale(n);
      case WeightFormat::kInt4Group: return float(code4(n, k) - 8) * group_scale(n, k);
      case WeightFormat::kInt4Zero: {
        const int zero = block(k)[kTileRows * layout.scale_bytes() + n];
        return float(code4(n, k) - zero) * group_scale(n, k);
      }
      case WeightFormat::kFp8Block:
        return e4m3_to_float(e4m3(n, k)) * load<float>(bytes + k / kFp8BlockSize * 4);
      case WeightFormat::kFp8Row: return e4m3_to_float(e4m3(n, k)) * row_scale(n);
      case WeightFormat::kMxFp8:
        return e4m3_to_float(e4m3(n, k)) * ue8m0_to_float(half_scale(n, k));
      case WeightFormat::kMxFp4:
        return e2m1_to_float(code4(n, k)) * ue8m0_to_float(half_scale(n, k));
      case WeightFormat::kNvFp4:  // the first product is exact
        return e2m1_to_float(code4(n, k)) * e4m3_to_float(half_scale(n, k)) * load<float>(bytes);
      default: return ggml_weight(layout, bytes, n, k);
    }
  }
};

}  // namespace

void unpack_matrix(const MatrixLayout& layout, const uint8_t* tiles, int64_t tile_stride,
                   float* dst, int64_t dst_stride) {
  for (int64_t row = 0; row < layout.rows; ++row) {
    const Tile tile{layout, tiles + row / kTileRows * tile_stride};
    for (int64_t k = 0; k < layout.cols; ++k)
      dst[row * dst_stride + k] = tile.weight(row % kTileRows, k);
  }
}

}  // namespace kt
