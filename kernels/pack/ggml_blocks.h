// Takes apart the blocks of ggml's formats in files (structs and dequantisation: ggml-common.h and
// ggml-quants.c of ggml).
#pragma once
#include <cstdint>
#include <cstring>

#include "kt/format.h"

namespace kt {

// One block of one row. Scales and codes are the numbers of kt/format.h.
struct GgmlBlock {
  uint16_t d, m;  // fp16
  // By sub-block, sub_bytes() each: the scale, then t if it has its own byte.
  uint8_t scales[16];
  uint8_t q[256];
};

// Byte offsets of a block's parts in a file; -1 if it has none. For Q2_K to Q6_K, "low" holds the
// first bits of the codes and "high" holds the others.
struct FileBlock {
  int d, low, high = -1, scales = -1;
};

constexpr FileBlock ggml_file_block(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_1: return {0, 4};
    case WeightFormat::kQ5_0: return {0, 6, 2};
    case WeightFormat::kQ5_1: return {0, 8, 4};
    case WeightFormat::kQ2K: return {80, 16, -1, 0};
    case WeightFormat::kQ3K: return {108, 32, 0, 96};
    case WeightFormat::kQ4K: return {0, 16, -1, 4};
    case WeightFormat::kQ5K: return {0, 48, 16, 4};
    case WeightFormat::kQ6K: return {208, 0, 128, 192};
    case WeightFormat::kQ8_0:
    case WeightFormat::kIQ4NL: return {0, 2};
    case WeightFormat::kIQ4XS: return {0, 8, -1, 2};
    default: __builtin_unreachable();  // would not compile: the format is a constant
  }
}

// Reads 2 * kHalf columns from kHalf bytes; the low nibbles are the first half.
template <int kHalf> void read_nibbles(const uint8_t* bytes, uint8_t* q) {
  for (int i = 0; i < kHalf; ++i) {
    q[i] = bytes[i] & 15;
    q[i + kHalf] = bytes[i] >> 4;
  }
}

// Copies bits [at, at + bits) of 32 bytes to the codes of 32 columns, from bit `to` on. Other bits
// of the codes stay, or become zeros if `to` is 0.
template <int bits> inline void read_bits(const uint8_t* bytes, int at, int to, uint8_t* q) {
  constexpr uint64_t kMask = 0x0101010101010101u * ((1u << bits) - 1);
  for (int i = 0; i < 32; i += 8) {
    uint64_t word, codes = 0;
    std::memcpy(&word, bytes + i, 8);
    if (to > 0) std::memcpy(&codes, q + i, 8);
    codes |= (word >> at & kMask) << to;
    std::memcpy(q + i, &codes, 8);
  }
}

// Sets bit 4 of 32 columns from 32 bits, eight at a time: each byte of `bits` selects one of eight.
inline void add_fifth_bits(const uint8_t* high, uint8_t* q) {
  for (int i = 0; i < 4; ++i, q += 8) {
    const uint64_t bits = high[i] * 0x0101010101010101u & 0x8040201008040201u;
    uint64_t codes;
    std::memcpy(&codes, q, 8);
    codes |= (bits + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    std::memcpy(q, &codes, 8);
  }
}

template <WeightFormat format>
void read_codes(const uint8_t* low, const uint8_t* high, uint8_t* q) {
  using enum WeightFormat;
  if constexpr (format == kQ8_0) {
    std::memcpy(q, low, 32);
  } else if constexpr (format == kQ4_1 || format == kIQ4NL) {
    read_nibbles<16>(low, q);
  } else if constexpr (format == kQ5_0 || format == kQ5_1) {
    read_nibbles<16>(low, q);
    add_fifth_bits(high, q);
  } else if constexpr (format == kQ2K || format == kQ3K) {
    for (int i = 0; i < 8; ++i) {
      read_bits<2>(low + i / 4 * 32, i % 4 * 2, 0, q + i * 32);
      if (format == kQ3K) read_bits<1>(high, i, 2, q + i * 32);
    }
  } else if constexpr (format == kQ4K || format == kQ5K) {
    for (int i = 0; i < 4; ++i) read_nibbles<32>(low + i * 32, q + i * 64);
    if (format == kQ5K)
      for (int i = 0; i < 8; ++i) read_bits<1>(high, i, 4, q + i * 32);
  } else if constexpr (format == kQ6K) {
    for (int i = 0; i < 2; ++i) read_nibbles<64>(low + i * 64, q + i * 128);
    for (int i = 0; i < 8; ++i) read_bits<2>(high + i / 4 * 32, i % 4 * 2, 4, q + i * 32);
  } else {
    static_assert(format == kIQ4XS);
    for (int i = 0; i < 8; ++i) read_nibbles<16>(low + i * 16, q + i * 32);
  }
}

// Eight scales and minimums of six bits each, in 12 bytes. Those of the first four are in bytes 0
// to 7. The others have four bits in bytes 8 to 11 and two in the top bits of bytes 0 to 7.
inline void read_6_bit_scales(const uint8_t* p, uint8_t* scales) {
  for (int i = 0; i < 4; ++i) {
    scales[2 * i] = p[i] & 63;
    scales[2 * i + 1] = p[i + 4] & 63;
    scales[2 * i + 8] = uint8_t((p[i + 8] & 15) | p[i] >> 6 << 4);
    scales[2 * i + 9] = uint8_t(p[i + 8] >> 4 | p[i + 4] >> 6 << 4);
  }
}

template <WeightFormat format> void read_scales(const uint8_t* p, uint8_t* scales) {
  using enum WeightFormat;
  if constexpr (format == kQ2K || format == kQ6K) {
    std::memcpy(scales, p, 16);
  } else if constexpr (format == kQ3K) {  // low four bits in bytes 0 to 7, high two in 8 to 11
    for (int i = 0; i < 16; ++i) {
      const int low = p[i % 8] >> i / 8 * 4 & 15, high = p[8 + i % 4] >> i / 4 * 2 & 3;
      scales[i] = uint8_t((low | high << 4) - 32);
    }
  } else if constexpr (format == kQ4K || format == kQ5K) {
    read_6_bit_scales(p, scales);
  } else {  // high two bits in 16 bits, low four bits in the next four bytes
    static_assert(format == kIQ4XS);
    for (int i = 0; i < 8; ++i) {
      const int low = p[2 + i / 2] >> i % 2 * 4 & 15, high = p[i / 4] >> i % 4 * 2 & 3;
      scales[i] = uint8_t((low | high << 4) - 32);
    }
  }
}

template <WeightFormat format> GgmlBlock read_ggml_block(const uint8_t* block) {
  constexpr FileBlock file = ggml_file_block(format);
  GgmlBlock read;
  std::memcpy(&read.d, block + file.d, 2);
  if constexpr (traits_of(format).scales.minimum) std::memcpy(&read.m, block + file.d + 2, 2);
  if constexpr (file.scales >= 0) read_scales<format>(block + file.scales, read.scales);
  read_codes<format>(block + file.low, block + file.high, read.q);
  return read;
}

}  // namespace kt
