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

  // The order of e4m3 bytes is its own inverse.
  uint8_t e4m3(int64_t n, int64_t k) const { return lane(n, k)[kE4m3Order[k & 3]]; }

  float group_scale(int64_t n, int64_t k) const {
    const uint8_t* p = block(k) + n * layout.scale_bytes();
    switch (layout.scale) {
      case ScaleType::kFP16: return fp16_to_float(load<uint16_t>(p));
      case ScaleType::kBF16: return bf16_to_float(load<uint16_t>(p));
      default: return load<float>(p);
    }
  }

  uint8_t byte_scale(int64_t n, int64_t k) const {
    return block(k)[k % layout.block_cols() / layout.traits().scales.cols * kTileRows + n];
  }

  // The offset of a 4-bit integer.
  int zero(int64_t n, int64_t k) const {
    const FormatTraits& f = layout.traits();
    return f.scales.zero ? block(k)[kTileRows * layout.scale_bytes() + n] : f.codes.offset;
  }

  // The value of a code, without scales.
  float value(int64_t n, int64_t k) const {
    switch (layout.traits().codes.type) {
      case CodeType::kBf16: return bf16_to_float(load<uint16_t>(lane(n, k) + k % 2 * 2));
      case CodeType::kSigned: return int8_t(lane(n, k)[k % 4]);
      case CodeType::kE4m3: return e4m3_to_float(e4m3(n, k));
      case CodeType::kE2m1: return e2m1_to_float(code4(n, k));
      default: return float(code4(n, k) - zero(n, k));
    }
  }

  // W[n, k], rounded at most once.
  float weight(int64_t n, int64_t k) const {
    switch (layout.traits().scales.kind) {
      case ScaleKind::kNone: return value(n, k);
      case ScaleKind::kRow: return value(n, k) * load<float>(bytes + n * 4);
      case ScaleKind::kBlock: return value(n, k) * load<float>(bytes + k / kFp8BlockSize * 4);
      case ScaleKind::kGroup: return value(n, k) * group_scale(n, k);
      case ScaleKind::kUe8m0: return value(n, k) * ue8m0_to_float(byte_scale(n, k));
      case ScaleKind::kE4m3:  // the first product is exact
        return value(n, k) * e4m3_to_float(byte_scale(n, k)) * load<float>(bytes);
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
