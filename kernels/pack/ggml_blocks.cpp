#include "ggml_blocks.h"

#include <cstring>

namespace kt {
namespace {

// Where a block's parts lie in a file, in bytes; -1 where it has none. Of Q2_K to Q6_K "low" is
// what the first bits of the codes are in, "high" what the others are in.
struct FileBlock {
  int d, low, high = -1, scales = -1;
};

constexpr FileBlock file_block(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_1: return {0, 4};
    case WeightFormat::kQ5_0: return {0, 6, 2};
    case WeightFormat::kQ5_1: return {0, 8, 4};
    case WeightFormat::kQ2K: return {80, 16, -1, 0};
    case WeightFormat::kQ3K: return {108, 32, 0, 96};
    case WeightFormat::kQ4K: return {0, 16, -1, 4};
    case WeightFormat::kQ5K: return {0, 48, 16, 4};
    case WeightFormat::kQ6K: return {208, 0, 128, 192};
    case WeightFormat::kIQ4XS: return {0, 8, -1, 2};
    default: return {0, 2};  // kQ8_0, kIQ4NL
  }
}

// 2 * kHalf columns from kHalf bytes: the low nibbles are the first half.
template <int kHalf> void read_nibbles(const uint8_t* bytes, uint8_t* q) {
  for (int i = 0; i < kHalf; ++i) {
    q[i] = bytes[i] & 15;
    q[i + kHalf] = bytes[i] >> 4;
  }
}

// 32 columns from bits [at, at + bits) of 32 bytes, to the code's bits from `to` on.
void read_bits(const uint8_t* bytes, int at, int bits, int to, uint8_t* q) {
  const int mask = (1 << bits) - 1;
  for (int i = 0; i < 32; ++i) q[i] |= uint8_t((bytes[i] >> at & mask) << to);
}

void read_codes(WeightFormat format, const uint8_t* low, const uint8_t* high, uint8_t* q) {
  switch (format) {
    case WeightFormat::kQ8_0: std::memcpy(q, low, 32); return;
    case WeightFormat::kQ4_1:
    case WeightFormat::kIQ4NL: read_nibbles<16>(low, q); return;
    case WeightFormat::kQ5_0:
    case WeightFormat::kQ5_1:
      read_nibbles<16>(low, q);
      for (int i = 0; i < 32; ++i) q[i] |= uint8_t((high[i / 8] >> i % 8 & 1) << 4);
      return;
    case WeightFormat::kQ2K:
      for (int i = 0; i < 8; ++i) read_bits(low + i / 4 * 32, i % 4 * 2, 2, 0, q + i * 32);
      return;
    case WeightFormat::kQ3K:
      for (int i = 0; i < 8; ++i) {
        read_bits(low + i / 4 * 32, i % 4 * 2, 2, 0, q + i * 32);
        read_bits(high, i, 1, 2, q + i * 32);
      }
      return;
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
      for (int i = 0; i < 4; ++i) read_nibbles<32>(low + i * 32, q + i * 64);
      if (format == WeightFormat::kQ5K)
        for (int i = 0; i < 8; ++i) read_bits(high, i, 1, 4, q + i * 32);
      return;
    case WeightFormat::kQ6K:
      for (int i = 0; i < 2; ++i) read_nibbles<64>(low + i * 64, q + i * 128);
      for (int i = 0; i < 8; ++i) read_bits(high + i / 4 * 32, i % 4 * 2, 2, 4, q + i * 32);
      return;
    default:  // kIQ4XS
      for (int i = 0; i < 8; ++i) read_nibbles<16>(low + i * 16, q + i * 32);
      return;
  }
}

// Six bits of each of eight scales and minimums in 12 bytes: those of the first four in bytes 0 to
// 7, those of the others split into four bits in bytes 8 to 11, and two in the tops of the first.
void read_6_bit_scales(const uint8_t* p, uint8_t* scales) {
  for (int i = 0; i < 4; ++i) {
    scales[2 * i] = p[i] & 63;
    scales[2 * i + 1] = p[i + 4] & 63;
    scales[2 * i + 8] = uint8_t((p[i + 8] & 15) | p[i] >> 6 << 4);
    scales[2 * i + 9] = uint8_t(p[i + 8] >> 4 | p[i + 4] >> 6 << 4);
  }
}

void read_scales(WeightFormat format, const uint8_t* p, uint8_t* scales) {
  switch (format) {
    case WeightFormat::kQ2K:
    case WeightFormat::kQ6K: std::memcpy(scales, p, 16); return;
    case WeightFormat::kQ3K:  // low four bits in bytes 0 to 7, two above in bytes 8 to 11
      for (int i = 0; i < 16; ++i) {
        const int low = p[i % 8] >> i / 8 * 4 & 15, high = p[8 + i % 4] >> i / 4 * 2 & 3;
        scales[i] = uint8_t((low | high << 4) - 32);
      }
      return;
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K: read_6_bit_scales(p, scales); return;
    default:  // kIQ4XS: two bits above in 16, low four bits in the four bytes after
      for (int i = 0; i < 8; ++i) {
        const int low = p[2 + i / 2] >> i % 2 * 4 & 15, high = p[i / 4] >> i % 4 * 2 & 3;
        scales[i] = uint8_t((low | high << 4) - 32);
      }
      return;
  }
}

}  // namespace

const uint8_t* ggml_d(WeightFormat format, const uint8_t* block) {
  return block + file_block(format).d;
}

GgmlBlock read_ggml_block(WeightFormat format, const uint8_t* block) {
  const FileBlock file = file_block(format);
  GgmlBlock read;
  std::memcpy(&read.d, block + file.d, 2);
  if (ggml_format(format).has_min) std::memcpy(&read.m, block + file.d + 2, 2);
  if (file.scales >= 0) read_scales(format, block + file.scales, read.scales);
  read_codes(format, block + file.low, block + file.high, read.q);
  return read;
}

}  // namespace kt
