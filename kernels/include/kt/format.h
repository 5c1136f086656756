// The packed weight layouts: the written specification of every byte that pack/ writes and the
// kernels in isa/ read. Layouts do not depend on the instruction set.
//
// A matrix W [N rows, K columns] becomes ceil(N/32) tiles of 32 rows. Rows past N and columns
// past K hold zeros. One tile is one contiguous stream in ascending k, 64-byte aligned; "lane n"
// is row n of the tile (0..31), so each step below is 32 lanes of 4 bytes = 128 bytes: two
// 16-column AMX B tiles side by side (row stride 128), two 512-bit or four 256-bit vectors.
//
//   kBF16      K padded to 32. Steps of 2 k: lane n = { W[n,k], W[n,k+1] } as bf16.
//   kInt8Row   256-byte head: float scale[32], int32 sum[32] (sum over k of q, for kernels that
//              offset activations to unsigned). K padded to 64. Steps of 4 k: lane n =
//              { q[n,k..k+3] } as int8 in [-127, 127]. W = q * scale[n].
//   kInt4Row   128-byte head: float scale[32]. K padded to 64. Steps of 8 k: byte b of lane n =
//              u[n,k+b] | u[n,k+4+b] << 4, u = q + 8, q in [-7, 7]. W = q * scale[n].
//   kInt4Group no head. K must be a multiple of the group g (itself a multiple of 32). For each
//              group: fp16 scale[32] (64 bytes), then g/8 steps as in kInt4Row.
//
// One expert of one pool is: gate tile 0, up tile 0, gate tile 1, up tile 1, ... (K = H, rows =
// the pool's part of I), then the down tiles (K = the pool's part of I, rows = H).
#pragma once
#include <cstdint>

namespace kt {

enum class WeightFormat : int { kBF16 = 0, kInt8Row = 1, kInt4Row = 2, kInt4Group = 3 };
constexpr int kFormatCount = 4;

constexpr int64_t kTileRows = 32;  // rows of a tile
// Largest H and I: the int32 sum of a row's products must not overflow, also with activations
// offset to 0..255 (isa/simd_avx512.inl).
constexpr int64_t kMaxColumns = 65536;
static_assert(255 * 127 * kMaxColumns < (int64_t{1} << 31));
constexpr int64_t kStepBytes = 128;  // 32 lanes of 4 bytes

// Functions that the isa/ objects call are always inlined: a shared out-of-line copy could be the
// one compiled for another instruction set.
#define KT_INLINE [[gnu::always_inline]] constexpr

KT_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
KT_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Where the parts of one matrix lie.
struct MatrixLayout {
  WeightFormat format;
  int64_t rows, cols;  // N, K as given
  int group;           // columns per scale; 0 for formats with one scale per row or none

  KT_INLINE int64_t tiles() const { return ceil_div(rows, kTileRows); }
  KT_INLINE int64_t cols_padded() const {
    switch (format) {
      case WeightFormat::kBF16: return round_up(cols, 32);
      case WeightFormat::kInt4Group: return round_up(cols, group);
      default: return round_up(cols, 64);
    }
  }
  KT_INLINE int64_t head_bytes() const {
    return format == WeightFormat::kInt8Row ? 256 : format == WeightFormat::kInt4Row ? 128 : 0;
  }
  KT_INLINE int64_t tile_bytes() const {
    const int64_t k = cols_padded();
    switch (format) {
      case WeightFormat::kBF16: return k / 2 * kStepBytes;
      case WeightFormat::kInt8Row: return head_bytes() + k / 4 * kStepBytes;
      case WeightFormat::kInt4Row: return head_bytes() + k / 8 * kStepBytes;
      default: return k / group * (2 * kTileRows + group / 8 * kStepBytes);
    }
  }
  KT_INLINE int64_t bytes() const { return tiles() * tile_bytes(); }
  // Columns that share a quantity along K, so that a pool's part of K must be a multiple of it.
  KT_INLINE int64_t split_unit() const { return group ? group : kTileRows; }
};

static_assert(MatrixLayout{WeightFormat::kBF16, 32, 32, 0}.tile_bytes() == 32 * 32 * 2);
static_assert(MatrixLayout{WeightFormat::kInt8Row, 32, 64, 0}.tile_bytes() == 256 + 32 * 64);
static_assert(MatrixLayout{WeightFormat::kInt4Row, 32, 64, 0}.tile_bytes() == 128 + 32 * 64 / 2);
static_assert(MatrixLayout{WeightFormat::kInt4Group, 32, 64, 32}.tile_bytes() == 32 * 64 * 9 / 16);

}  // namespace kt
