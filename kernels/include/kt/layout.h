// The positions of the parts of a packed matrix (kt/format.h).
#pragma once
#include "kt/format.h"

namespace kt {

struct MatrixLayout {
  WeightFormat format;
  int64_t rows, cols;  // N, K as given
  int group;           // columns per scale of ScaleKind::kGroup; 0 for other formats
  ScaleType scale = ScaleType::kFP16;  // of the same

  // The same layout with a format that is known at compile time.
  template <WeightFormat kFormat> KT_INLINE MatrixLayout as() const {
    return {kFormat, rows, cols, group, scale};
  }
  KT_INLINE const FormatTraits& traits() const { return traits_of(format); }
  KT_INLINE bool has_group() const { return traits().scales.kind == ScaleKind::kGroup; }
  KT_INLINE int64_t tiles() const { return ceil_div(rows, kTileRows); }
  KT_INLINE int64_t cols_padded() const { return round_up(cols, block_cols()); }
  KT_INLINE int64_t head_bytes() const {
    return traits().scales.kind == ScaleKind::kBlock
               ? round_up(ceil_div(cols, kFp8BlockSize) * 4, 64)
               : traits().head_bytes;
  }
  // Columns of a block, which are stored together with their scales.
  KT_INLINE int64_t block_cols() const { return has_group() ? group : traits().block_cols; }
  KT_INLINE int64_t block_scale_bytes() const {  // before the steps of a block
    return traits().scale_bytes + (has_group() ? kTileRows * scale_bytes() : 0);
  }
  KT_INLINE int64_t scale_bytes() const { return scale == ScaleType::kFP32 ? 4 : 2; }
  KT_INLINE int64_t code_bits() const { return traits().codes.bits; }
  // Columns of a step, if all steps have codes of the same bits.
  KT_INLINE int64_t step_cols() const { return 32 / code_bits(); }
  KT_INLINE int64_t block_bytes() const {
    return block_scale_bytes() + block_cols() * code_bits() * kTileRows / 8;
  }
  KT_INLINE int64_t tile_bytes() const {
    return head_bytes() + cols_padded() / block_cols() * block_bytes();
  }
  KT_INLINE int64_t bytes() const { return tiles() * tile_bytes(); }
  // H and I must be multiples of this.
  KT_INLINE int64_t column_unit() const { return has_group() ? group : traits().column_unit; }
  // A pool's part of I must be a multiple of this: whole tiles, blocks and scales, with padding
  // only at the end.
  KT_INLINE int64_t split_unit() const {
    return traits().scales.kind == ScaleKind::kBlock ? kFp8BlockSize : block_cols();
  }
};

static_assert(MatrixLayout{WeightFormat::kBF16, 32, 32, 0}.tile_bytes() == 32 * 32 * 2);
static_assert(MatrixLayout{WeightFormat::kInt8Row, 32, 64, 0}.tile_bytes() == 256 + 32 * 64);
static_assert(MatrixLayout{WeightFormat::kInt4Row, 32, 64, 0}.tile_bytes() == 128 + 32 * 64 / 2);
static_assert(MatrixLayout{WeightFormat::kInt4Group, 32, 64, 32}.tile_bytes() == 32 * 64 * 9 / 16);
static_assert(MatrixLayout{WeightFormat::kInt4Zero, 32, 128, 128}.tile_bytes() == 128 + 2048);
static_assert(MatrixLayout{WeightFormat::kFp8Block, 32, 200, 0}.tile_bytes() == 64 + 32 * 256);
static_assert(MatrixLayout{WeightFormat::kMxFp8, 32, 96, 0}.tile_bytes() == 2 * (64 + 32 * 64));
static_assert(MatrixLayout{WeightFormat::kMxFp4, 32, 96, 0}.tile_bytes() == 2 * (64 + 32 * 32));
static_assert(MatrixLayout{WeightFormat::kNvFp4, 32, 48, 0}.tile_bytes() ==
              64 + 2 * (64 + 32 * 16));

}  // namespace kt
