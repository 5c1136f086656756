// The packed weight layouts: the written specification of every byte that pack/ writes and the
// kernels in isa/ read. Layouts do not depend on the instruction set.
//
// A matrix W [N rows, K columns] becomes ceil(N/32) tiles of 32 rows. One tile is one contiguous
// stream in ascending k, 64-byte aligned: a head, then blocks of columns, each with its scales and
// its steps. "Lane n" is row n of the tile (0..31), so each step is 32 lanes of 4 bytes = 128
// bytes: two 16-column AMX B tiles side by side (row stride 128), two 512-bit or four 256-bit
// vectors. Steps are of three kinds:
//
//   16-bit step  2 k: lane n = { W[n,k], W[n,k+1] }
//   8-bit step   4 k: lane n = { q[n,k], q[n,k+1], q[n,k+2], q[n,k+3] }; e4m3 codes in the order
//                k, k+2, k+1, k+3, so that the even and the odd bytes are 16-bit pairs of columns
//   4-bit step   8 k: byte b of lane n = q[n,k+b] | q[n,k+4+b] << 4
//
//   format      head                       K padded to  block of columns, and what it holds
//   kBF16       -                          32           2: 16-bit step of bf16
//   kInt8Row    float scale[32],           64           4: 8-bit step of int8 in [-127, 127]
//               int32 sum[32]                           W = q * scale[n]; sum of the row's q, for
//                                                       kernels that offset activations to unsigned
//   kInt4Row    float scale[32]            64           8: 4-bit step of u = q + 8, q in [-7, 7]
//                                                       W = q * scale[n]
//   kInt4Group  -                          group        group: scale[32], group/8 4-bit steps of u
//                                                       W = (u - 8) * scale[n]
//   kInt4Zero   -                          group        group: scale[32], uint8 zero[32] and 32
//                                                       bytes of zeros, group/8 4-bit steps of u
//                                                       W = (u - zero[n]) * scale[n], zero <= 16
//   kFp8Block   float scale[ceil(K/128)],  64           4: 8-bit step of e4m3
//               padded to 64 bytes                      W = e4m3 * scale[k / 128]
//   kFp8Row     float scale[32]            64           4: 8-bit step of e4m3; W = e4m3 * scale[n]
//   kMxFp8      -                          64           64: ue8m0 scale[32] of 32 columns, the
//                                                       same of the others, 16 8-bit steps of
//                                                       e4m3; W = e4m3 * 2^(scale[n] - 127)
//   kMxFp4      -                          64           64: scales as kMxFp8, 8 4-bit steps of e2m1
//                                                       W = e2m1 * 2^(scale[n] - 127)
//   kNvFp4      float global, padded to    32           32: e4m3 scale[32] of the first 16 columns,
//               64 bytes                                the same of the others, 4 4-bit steps of
//                                                       e2m1; W = e2m1 * scale[n] * global
//
// Rows past N and columns past K are pads that dequantise to 0: codes of 0 (u = 8 in kInt4Row and
// kInt4Group; u = 0 with zero = 0 in kInt4Zero) and scales of 0, except ue8m0 scales, which have no
// zero: 127 (1.0). Pads of a head are zeros.
//
// Scales are finite and not negative; those of kNvFp4 have no sign bit, ue8m0 ones are at most 254.
// Scales of kInt4Group and kInt4Zero are fp16, bf16 or float32, as their source has them. For
// these two K must be a multiple of the group (itself a multiple of 32); for kMxFp4 and kMxFp8 of
// 32, for kNvFp4 of 16. Blocks of kFp8Block are 128 rows by 128 columns and may be ragged at the
// matrix's edges. e4m3 is the "fn" variant: no infinities, 0x7f and 0xff are NaN (refused when
// packing). e2m1 codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Both from the OCP
// Microscaling Formats specification 1.0 and OFP8 1.0.
//
// One expert of one pool is: gate tile 0, up tile 0, gate tile 1, up tile 1, ... (K = H, rows =
// the pool's part of I), then the down tiles (K = the pool's part of I, rows = H).
#pragma once
#include <cstdint>

namespace kt {

// Changes with any packed byte, so that files of packed weights can tell. The golden bytes of
// tests/kernels/test_pack_golden.py change only together with it.
constexpr int kLayoutVersion = 1;

enum class WeightFormat : int {
  kBF16 = 0,
  kInt8Row = 1,
  kInt4Row = 2,
  kInt4Group = 3,
  kInt4Zero = 4,
  kFp8Block = 5,
  kFp8Row = 6,
  kMxFp8 = 7,
  kMxFp4 = 8,
  kNvFp4 = 9,
};
constexpr int kFormatCount = 10;

// Type of the scales of kInt4Group and kInt4Zero.
enum class ScaleType : int { kFP16 = 0, kBF16 = 1, kFP32 = 2 };

constexpr int64_t kTileRows = 32;  // rows of a tile
constexpr int64_t kFp8BlockSize = 128;
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
  int group;           // columns per scale of kInt4Group and kInt4Zero; 0 for other formats
  ScaleType scale = ScaleType::kFP16;  // of the same two

  KT_INLINE int64_t tiles() const { return ceil_div(rows, kTileRows); }
  KT_INLINE int64_t cols_padded() const { return round_up(cols, pad_unit()); }
  KT_INLINE int64_t head_bytes() const {
    switch (format) {
      case WeightFormat::kInt8Row: return 256;
      case WeightFormat::kInt4Row:
      case WeightFormat::kFp8Row: return 128;
      case WeightFormat::kFp8Block: return round_up(ceil_div(cols, kFp8BlockSize) * 4, 64);
      case WeightFormat::kNvFp4: return 64;
      default: return 0;
    }
  }
  // Columns that come together in the stream, with their scales.
  KT_INLINE int64_t block_cols() const {
    switch (format) {
      case WeightFormat::kBF16: return 2;
      case WeightFormat::kInt4Row: return 8;
      case WeightFormat::kInt4Group:
      case WeightFormat::kInt4Zero: return group;
      case WeightFormat::kMxFp8:
      case WeightFormat::kMxFp4: return 64;
      case WeightFormat::kNvFp4: return 32;
      default: return 4;
    }
  }
  KT_INLINE int64_t block_scale_bytes() const {  // before the steps of a block
    switch (format) {
      case WeightFormat::kInt4Group: return kTileRows * scale_bytes();
      case WeightFormat::kInt4Zero: return kTileRows * scale_bytes() + 64;
      case WeightFormat::kMxFp8:
      case WeightFormat::kMxFp4:
      case WeightFormat::kNvFp4: return 64;
      default: return 0;
    }
  }
  KT_INLINE int64_t step_cols() const {
    switch (format) {
      case WeightFormat::kBF16: return 2;
      case WeightFormat::kInt8Row:
      case WeightFormat::kFp8Block:
      case WeightFormat::kFp8Row:
      case WeightFormat::kMxFp8: return 4;
      default: return 8;
    }
  }
  KT_INLINE int64_t block_bytes() const {
    return block_scale_bytes() + block_cols() / step_cols() * kStepBytes;
  }
  KT_INLINE int64_t tile_bytes() const {
    return head_bytes() + cols_padded() / block_cols() * block_bytes();
  }
  KT_INLINE int64_t bytes() const { return tiles() * tile_bytes(); }
  KT_INLINE int64_t scale_bytes() const { return scale == ScaleType::kFP32 ? 4 : 2; }
  KT_INLINE bool has_group() const {
    return format == WeightFormat::kInt4Group || format == WeightFormat::kInt4Zero;
  }
  // What H and I must be multiples of.
  KT_INLINE int64_t column_unit() const {
    switch (format) {
      case WeightFormat::kInt4Group:
      case WeightFormat::kInt4Zero: return group;
      case WeightFormat::kMxFp8:
      case WeightFormat::kMxFp4: return 32;
      case WeightFormat::kNvFp4: return 16;
      default: return 1;
    }
  }
  // Columns and rows that share a scale: a pool's part of I must be a multiple of it.
  KT_INLINE int64_t split_unit() const {
    if (format == WeightFormat::kFp8Block) return kFp8BlockSize;
    return has_group() ? group : kTileRows;
  }

 private:
  KT_INLINE int64_t pad_unit() const {
    switch (format) {
      case WeightFormat::kBF16:
      case WeightFormat::kNvFp4: return 32;
      case WeightFormat::kInt4Group:
      case WeightFormat::kInt4Zero: return group;
      default: return 64;
    }
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
