// The packed weight layouts: the written specification of every byte that pack/ writes and the
// kernels in isa/ read. Layouts do not depend on the instruction set.
//
// A matrix W [N rows, K columns] becomes ceil(N/32) tiles of 32 rows. One tile is one contiguous
// stream in ascending k, 64-byte aligned: a head, then blocks of columns, each with its scales and
// its steps. "Lane n" is row n of the tile (0..31), so each step is 32 lanes of 4 bytes = 128
// bytes: two 16-column AMX B tiles side by side (row stride 128), two 512-bit or four 256-bit
// vectors. A step of bits p holds 32 / p columns:
//
//   16-bit step  2 k: lane n = { W[n,k], W[n,k+1] }
//   8-bit step   4 k: lane n = { q[n,k], q[n,k+1], q[n,k+2], q[n,k+3] }; e4m3 codes in the order
//                k, k+2, k+1, k+3, so that the even and the odd bytes are 16-bit pairs of columns
//   4-bit step   8 k: byte b of lane n = q[n,k+b] | q[n,k+4+b] << 4
//   2-bit step   16 k: byte b of lane n = the q[n,k+4j+b] << 2j of j = 0..3
//   1-bit step   32 k: byte b of lane n = the q[n,k+4j+b] << j of j = 0..7
//
// So (lane >> p * j) & mask are the codes of four columns, 4j to 4j+3, in four bytes, whatever p.
//
//   format      head                       K padded to  block of columns, and what it holds
//   kBF16       -                          32           2: 16-bit step of bf16
//   kInt8Row    float scale[32],           64           4: 8-bit step of int8 q
//               int32 sum[32]                           W = q * scale[n]; sum of the row's q, for
//                                                       kernels that offset activations to unsigned
//   kInt4Row    float scale[32]            64           8: 4-bit step of u = q + 8, any u
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
// The formats of ggml keep its quantisation, block by block. K is a multiple of the block; a block
// is fp16 d[32]; fp16 m[32] where there are minimums; the scales of its sub-blocks in ascending k,
// each a byte for every row; then, for each 32 columns, the steps of their codes q: for 3, 5 and 6
// bits those of the low 2, 4 and 4 bits, then those of the bits above (a "plane" each).
//
//   format   block  per sub-block of columns                 steps per 32 columns  W
//   kQ4_1    32     -                                        4 4-bit               d q + m
//   kQ5_0    32     - (no m)                                 4 4-bit, 1 1-bit      d (q - 16)
//   kQ5_1    32     -                                        4 4-bit, 1 1-bit      d q + m
//   kQ8_0    32     - (no m)                                 8 8-bit (q is int8)   d q
//   kQ2K     256    16: uint8 s | t << 4                     2 2-bit               d s q - m t
//   kQ3K     256    16: int8 s in [-32, 31] (no m)           2 2-bit, 1 1-bit      d s (q - 4)
//   kQ4K     256    32: uint8 s[32], uint8 t[32], all <= 63  4 4-bit               d s q - m t
//   kQ5K     256    32: the same                             4 4-bit, 1 1-bit      d s q - m t
//   kQ6K     256    16: int8 s (no m)                        4 4-bit, 2 2-bit      d s (q - 32)
//   kIQ4NL   32     - (no m)                                 4 4-bit               d c[q]
//   kIQ4XS   256    32: int8 s in [-32, 31] (no m)           4 4-bit               d s c[q]
//
// c is kIq4Values. d and m are finite and of any sign. The products are exact in float32, so W as
// float32 has one rounding at most, where m is.
//
// Rows past N and columns past K are pads that dequantise to 0: codes of 0 (u = 8 in kInt4Row and
// kInt4Group; u = 0 with zero = 0 in kInt4Zero) and scales of 0, except ue8m0 scales, which have no
// zero: 127 (1.0). Pads of a head and of ggml's formats are zeros.
//
// Scales are finite; only those of kInt4Group, kInt4Zero and ggml's formats may be negative. Those
// of kNvFp4 have no sign bit, ue8m0 ones are at most 254.
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
constexpr int kLayoutVersion = 2;

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
  kQ4_1 = 10,
  kQ5_0 = 11,
  kQ5_1 = 12,
  kQ8_0 = 13,
  kQ2K = 14,
  kQ3K = 15,
  kQ4K = 16,
  kQ5K = 17,
  kQ6K = 18,
  kIQ4NL = 19,
  kIQ4XS = 20,
};
constexpr int kFormatCount = 21;

// Type of the scales of kInt4Group and kInt4Zero.
enum class ScaleType : int { kFP16 = 0, kBF16 = 1, kFP32 = 2 };

constexpr int64_t kTileRows = 32;  // rows of a tile
constexpr int64_t kFp8BlockSize = 128;
// Largest H and I: the int32 sum of a row's products must not overflow, also with activations
// offset to 0..255 (isa/simd_avx512.inl).
constexpr int64_t kMaxColumns = 65536;
static_assert(255 * 128 * kMaxColumns < (int64_t{1} << 31));
constexpr int64_t kStepBytes = 128;  // 32 lanes of 4 bytes

// Functions that the isa/ objects call are always inlined: a shared out-of-line copy could be the
// one compiled for another instruction set.
#define KT_INLINE [[gnu::always_inline]] constexpr

KT_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
KT_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Bits of the first plane of codes; what is left is in the second.
KT_INLINE int low_plane_bits(int bits) { return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits; }

// The blocks of one of ggml's formats, packed and in a file (ggml-common.h of ggml).
struct GgmlFormat {
  int block_cols;
  int file_bytes;  // of a row's block
  int bits;        // of a code
  bool has_min;
  int sub_cols;  // columns per scale within the block; 0 where d is all there is
  int offset;    // what codes are above the integers they stand for

  // Bytes per row of the scales of a sub-block: a scale, and t where it has a byte of its own.
  KT_INLINE int sub_bytes() const { return has_min && sub_cols == 32 ? 2 : 1; }
  KT_INLINE int low_bits() const { return low_plane_bits(bits); }
  // Packed, of all 32 rows: before the scales of sub-blocks, before the steps, and all.
  KT_INLINE int64_t d_bytes() const { return kTileRows * 2 * (has_min ? 2 : 1); }
  KT_INLINE int64_t scale_bytes() const {
    return d_bytes() + (sub_cols ? block_cols / sub_cols * sub_bytes() * kTileRows : 0);
  }
  // Of the steps of 32 columns.
  KT_INLINE int64_t part_bytes() const { return bits * kStepBytes; }
};

KT_INLINE bool is_ggml(WeightFormat format) { return format >= WeightFormat::kQ4_1; }

KT_INLINE GgmlFormat ggml_format(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_1: return {32, 20, 4, true, 0, 0};
    case WeightFormat::kQ5_0: return {32, 22, 5, false, 0, 16};
    case WeightFormat::kQ5_1: return {32, 24, 5, true, 0, 0};
    case WeightFormat::kQ8_0: return {32, 34, 8, false, 0, 0};
    case WeightFormat::kQ2K: return {256, 84, 2, true, 16, 0};
    case WeightFormat::kQ3K: return {256, 110, 3, false, 16, 4};
    case WeightFormat::kQ4K: return {256, 144, 4, true, 32, 0};
    case WeightFormat::kQ5K: return {256, 176, 5, true, 32, 0};
    case WeightFormat::kQ6K: return {256, 210, 6, false, 16, 32};
    case WeightFormat::kIQ4NL: return {32, 18, 4, false, 0, 0};
    case WeightFormat::kIQ4XS: return {256, 136, 4, false, 32, 0};
    default: return {};
  }
}

// What the codes of kIQ4NL and kIQ4XS stand for.
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};

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
    if (is_ggml(format)) return ggml_format(format).block_cols;
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
    if (is_ggml(format)) return ggml_format(format).scale_bytes();
    switch (format) {
      case WeightFormat::kInt4Group: return kTileRows * scale_bytes();
      case WeightFormat::kInt4Zero: return kTileRows * scale_bytes() + 64;
      case WeightFormat::kMxFp8:
      case WeightFormat::kMxFp4:
      case WeightFormat::kNvFp4: return 64;
      default: return 0;
    }
  }
  KT_INLINE int64_t code_bits() const {
    if (is_ggml(format)) return ggml_format(format).bits;
    switch (format) {
      case WeightFormat::kBF16: return 16;
      case WeightFormat::kInt8Row:
      case WeightFormat::kFp8Block:
      case WeightFormat::kFp8Row:
      case WeightFormat::kMxFp8: return 8;
      default: return 4;
    }
  }
  // Columns of a step, where all are of the same bits.
  KT_INLINE int64_t step_cols() const { return 32 / code_bits(); }
  KT_INLINE int64_t block_bytes() const {
    return block_scale_bytes() + block_cols() * code_bits() * kTileRows / 8;
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
    if (is_ggml(format)) return block_cols();
    switch (format) {
      case WeightFormat::kInt4Group:
      case WeightFormat::kInt4Zero: return group;
      case WeightFormat::kMxFp8:
      case WeightFormat::kMxFp4: return 32;
      case WeightFormat::kNvFp4: return 16;
      default: return 1;
    }
  }
  // What a pool's part of I must be a multiple of: whole tiles, blocks and scales, and no pads but
  // at the end.
  KT_INLINE int64_t split_unit() const {
    return format == WeightFormat::kFp8Block ? kFp8BlockSize : pad_unit();
  }

 private:
  KT_INLINE int64_t pad_unit() const {
    if (is_ggml(format)) return block_cols();
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
// As many bytes as in a file, but for the 6-bit scales.
static_assert(MatrixLayout{WeightFormat::kQ4_1, 32, 32, 0}.tile_bytes() == 32 * 20);
static_assert(MatrixLayout{WeightFormat::kQ5_0, 32, 32, 0}.tile_bytes() == 32 * 22);
static_assert(MatrixLayout{WeightFormat::kQ5_1, 32, 32, 0}.tile_bytes() == 32 * 24);
static_assert(MatrixLayout{WeightFormat::kQ8_0, 32, 32, 0}.tile_bytes() == 32 * 34);
static_assert(MatrixLayout{WeightFormat::kQ2K, 32, 256, 0}.tile_bytes() == 32 * 84);
static_assert(MatrixLayout{WeightFormat::kQ3K, 32, 256, 0}.tile_bytes() == 32 * 114);
static_assert(MatrixLayout{WeightFormat::kQ4K, 32, 256, 0}.tile_bytes() == 32 * 148);
static_assert(MatrixLayout{WeightFormat::kQ5K, 32, 256, 0}.tile_bytes() == 32 * 180);
static_assert(MatrixLayout{WeightFormat::kQ6K, 32, 256, 0}.tile_bytes() == 32 * 210);
static_assert(MatrixLayout{WeightFormat::kIQ4NL, 32, 32, 0}.tile_bytes() == 32 * 18);
static_assert(MatrixLayout{WeightFormat::kIQ4XS, 32, 256, 0}.tile_bytes() == 32 * 138);

}  // namespace kt
