// Weights of a source by the definitions of their formats, one at a time, in float64. Independent
// of kernels/pack.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pack/pack.h"

namespace fuzz {

using kt::DType;
using kt::MatrixLayout;
using kt::MatrixSource;
using kt::ScaleType;
using kt::WeightFormat;

inline uint32_t bits_at(const void* p, int64_t i, int size) {
  uint32_t x = 0;
  std::memcpy(&x, static_cast<const uint8_t*>(p) + i * size, size_t(size));
  return x;
}

// A binary float with these bits of exponent and mantissa, with infinities and NaN as in IEEE 754.
inline double ieee(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, mask = (1 << exponent_bits) - 1;
  const int exponent = int(bits >> mantissa_bits) & mask;
  const double mantissa = bits & ((1u << mantissa_bits) - 1);
  const bool negative = bits >> (exponent_bits + mantissa_bits) & 1;
  double value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  if (exponent == mask)
    value = mantissa == 0 ? HUGE_VAL : std::nan("");
  else if (exponent > 0)
    value = std::ldexp(std::ldexp(1.0, mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return negative ? -value : value;
}

inline double fp16_at(const void* p, int64_t i) { return ieee(bits_at(p, i, 2), 5, 10); }
inline double float_at(const void* p, DType type, int64_t i) {
  if (type == DType::kFP16) return fp16_at(p, i);
  // The CPU's own type, of which bf16 is the upper half.
  const uint32_t bits = type == DType::kBF16 ? bits_at(p, i, 2) << 16 : bits_at(p, i, 4);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline double e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 127) == 127) return std::nan("");
  const double value =
      exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return x & 128 ? -value : value;
}
inline double e2m1(int x) {
  const int exponent = x >> 1 & 3, mantissa = x & 1;
  const double value = exponent ? std::ldexp(2 + mantissa, exponent - 2) : 0.5 * mantissa;
  return x & 8 ? -value : value;
}
inline double ue8m0(uint8_t x) { return x == 255 ? std::nan("") : std::ldexp(1.0, x - 127); }
inline int nibble(const uint8_t* p, int64_t k) { return p[k / 2] >> k % 2 * 4 & 15; }

inline double group_scale(ScaleType type, const void* p, int64_t i) {
  const DType types[] = {DType::kFP16, DType::kBF16, DType::kFP32};
  return float_at(p, types[int(type)], i);
}

// The position of d in a block of a file; m follows it if there is one (ggml-common.h).
inline int ggml_d(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ2K: return 80;
    case WeightFormat::kQ3K: return 108;
    case WeightFormat::kQ6K: return 208;
    default: return 0;
  }
}

// Column k of a block, as in ggml's dequantize_row_* functions.
inline double ggml_weight(WeightFormat format, const uint8_t* b, int k) {
  static constexpr int kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
  const double d = fp16_at(b + ggml_d(format), 0);
  const double m = kt::traits_of(format).scales.minimum ? fp16_at(b + ggml_d(format) + 2, 0) : 0;
  const auto half = [&](const uint8_t* q, int n, int i) {  // low nibbles are the first n
    return i < n ? q[i] & 15 : q[i - n] >> 4;
  };
  const int sub = k / 32, lane = k % 32;
  const auto fifth = [&](const uint8_t* q) { return q[k / 8] >> k % 8 & 1; };
  // The 2 bits of a column in Q2_K, Q3_K.
  const auto pair = [&](const uint8_t* q) { return q[k / 128 * 32 + lane] >> sub % 4 * 2 & 3; };
  const auto scale_of_k4 = [&](const uint8_t* s, bool minimum) {
    const int low = s[minimum ? (sub % 4) + 4 : sub % 4];
    if (sub < 4) return low & 63;
    return (minimum ? s[sub + 4] >> 4 : s[sub + 4] & 15) | low >> 6 << 4;
  };
  switch (format) {
    case WeightFormat::kQ4_1: return d * half(b + 4, 16, k) + m;
    case WeightFormat::kQ5_0: return d * ((half(b + 6, 16, k) | fifth(b + 2) << 4) - 16);
    case WeightFormat::kQ5_1: return d * (half(b + 8, 16, k) | fifth(b + 4) << 4) + m;
    case WeightFormat::kQ8_0: return d * int8_t(b[2 + k]);
    case WeightFormat::kQ2K: return d * (b[k / 16] & 15) * pair(b + 16) - m * (b[k / 16] >> 4);
    case WeightFormat::kQ3K: {
      const int i = k / 16;
      const uint8_t* s = b + 96;
      const int scale = (i < 8 ? s[i] & 15 : s[i - 8] >> 4) | (s[8 + i % 4] >> i / 4 * 2 & 3) << 4;
      return d * (scale - 32) * (pair(b + 32) - (b[lane] >> sub & 1 ? 0 : 4));
    }
    case WeightFormat::kQ4K:
      return d * scale_of_k4(b + 4, false) * half(b + 16 + k / 64 * 32, 32, k % 64) -
             m * scale_of_k4(b + 4, true);
    case WeightFormat::kQ5K:
      return d * scale_of_k4(b + 4, false) *
                 (half(b + 48 + k / 64 * 32, 32, k % 64) | (b[16 + lane] >> sub & 1) << 4) -
             m * scale_of_k4(b + 4, true);
    case WeightFormat::kQ6K: {
      const int low = half(b + k / 128 * 64, 64, k % 128);
      const int high = b[128 + k / 128 * 32 + lane] >> sub % 4 * 2 & 3;
      return d * int8_t(b[192 + k / 16]) * ((low | high << 4) - 32);
    }
    case WeightFormat::kIQ4NL: return d * kValues[half(b + 2, 16, k)];
    default: {
      const int low = b[4 + sub / 2] >> sub % 2 * 4 & 15, high = b[2 + sub / 4] >> sub % 4 * 2 & 3;
      return d * ((low | high << 4) - 32) * kValues[half(b + 8 + sub * 16, 16, lane)];
    }
  }
}

// W[n, k] of a quantised source, before its only rounding to float32.
inline double weight(const MatrixLayout& layout, const MatrixSource& source, int64_t n, int64_t k) {
  const auto* data = static_cast<const uint8_t*>(source.weights.data);
  const auto* scale = static_cast<const uint8_t*>(source.weights.scale);
  const int64_t cols = source.cols, at = n * cols + k;
  const auto code4 = [&] { return nibble(data + n * (cols / 2), k); };
  const auto of_group = [&] { return n * (cols / layout.group) + k / layout.group; };
  switch (layout.format) {
    case WeightFormat::kInt8Row: return int8_t(data[at]) * float_at(scale, DType::kFP32, n);
    case WeightFormat::kInt4Row: return (code4() - 8) * float_at(scale, DType::kFP32, n);
    case WeightFormat::kInt4Group:
      return (code4() - 8) * group_scale(layout.scale, scale, of_group());
    case WeightFormat::kInt4Zero: {
      const int zero = static_cast<const uint8_t*>(source.weights.zero)[of_group()];
      return (code4() - zero) * group_scale(layout.scale, scale, of_group());
    }
    case WeightFormat::kFp8Block:
      return e4m3(data[at]) *
             float_at(scale, DType::kFP32, n / 128 * ((cols + 127) / 128) + k / 128);
    case WeightFormat::kFp8Row: return e4m3(data[at]) * float_at(scale, DType::kFP32, n);
    case WeightFormat::kMxFp8: return e4m3(data[at]) * ue8m0(scale[n * (cols / 32) + k / 32]);
    case WeightFormat::kMxFp4: return e2m1(code4()) * ue8m0(scale[n * (cols / 32) + k / 32]);
    case WeightFormat::kNvFp4:
      return e2m1(code4()) * e4m3(scale[n * (cols / 16) + k / 16]) * source.weights.global;
    default: {
      const kt::FormatTraits& f = layout.traits();
      const int64_t block = n * (cols / f.block_cols) + k / f.block_cols;
      return ggml_weight(layout.format, data + block * f.file_bytes, int(k % f.block_cols));
    }
  }
}

// Checks the exponent, which is all ones in infinities and NaN.
inline bool finite_at(const void* p, ScaleType type, int64_t i) {
  switch (type) {
    case ScaleType::kFP16: return (bits_at(p, i, 2) & 0x7c00) != 0x7c00;
    case ScaleType::kBF16: return (bits_at(p, i, 2) & 0x7f80) != 0x7f80;
    default: return (bits_at(p, i, 4) & 0x7f800000) != 0x7f800000;
  }
}

// Whether everything from which the weight is computed is in its format's range.
inline bool acceptable(const MatrixLayout& layout, const MatrixSource& source, int64_t n,
                       int64_t k) {
  const auto* data = static_cast<const uint8_t*>(source.weights.data);
  const auto* scale = static_cast<const uint8_t*>(source.weights.scale);
  const int64_t cols = source.cols, group = layout.group ? layout.group : 1;
  const auto at_least_0 = [](double x) { return std::isfinite(x) && x >= 0; };
  const auto scale_is_good = [&](int64_t i) {
    return at_least_0(float_at(scale, DType::kFP32, i));
  };
  const auto number = [&] { return (data[n * cols + k] & 127) != 127; };  // of e4m3
  switch (layout.format) {
    case WeightFormat::kInt8Row:
    case WeightFormat::kInt4Row: return finite_at(scale, ScaleType::kFP32, n);
    case WeightFormat::kInt4Zero:
      if (static_cast<const uint8_t*>(source.weights.zero)[n * (cols / group) + k / group] > 16)
        return false;
      [[fallthrough]];
    case WeightFormat::kInt4Group:
      return finite_at(scale, layout.scale, n * (cols / group) + k / group);
    case WeightFormat::kFp8Block:
      return scale_is_good(n / 128 * ((cols + 127) / 128) + k / 128) && number();
    case WeightFormat::kFp8Row: return scale_is_good(n) && number();
    case WeightFormat::kMxFp8: return scale[n * (cols / 32) + k / 32] != 255 && number();
    case WeightFormat::kMxFp4: return scale[n * (cols / 32) + k / 32] != 255;
    case WeightFormat::kNvFp4:
      return scale[n * (cols / 16) + k / 16] < 127 && at_least_0(source.weights.global);
    default: {
      const kt::FormatTraits& f = layout.traits();
      const uint8_t* block = data + (n * (cols / f.block_cols) + k / f.block_cols) * f.file_bytes;
      const uint8_t* d = block + ggml_d(layout.format);
      return finite_at(d, ScaleType::kFP16, 0) &&
             (!f.scales.minimum || finite_at(d, ScaleType::kFP16, 1));
    }
  }
}

}  // namespace fuzz
