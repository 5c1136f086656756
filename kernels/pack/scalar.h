// Scalar conversions: to float32 from the 16-bit types and from the 8- and 4-bit types of the OCP
// Microscaling Formats specification 1.0; to fp16 with round-to-nearest-even.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kt/types.h"

namespace kt {

// A number at any address.
template <class T> inline T load(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }

inline float fp16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
    const float magnitude = float(mantissa) * 5.9604644775390625e-8f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline uint16_t float_to_fp16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 6.103515625e-5f)  // subnormal: units of 2^-24, rint rounds to even
    return sign | uint16_t(std::rint(magnitude * 16777216.0f));
  const uint32_t m = std::bit_cast<uint32_t>(magnitude);
  return sign | uint16_t((m + 0xfff + (m >> 13 & 1) - (112u << 23)) >> 13);
}

// "fn" variant: exponents 1 to 15, bias 7, no infinities; exponent 15 with mantissa 7 is NaN.
inline float e4m3_to_float(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float magnitude = exponent == 0        ? std::ldexp(float(mantissa), -9)
                          : (x & 0x7f) == 0x7f ? NAN
                                               : std::ldexp(float(8 + mantissa), exponent - 10);
  return std::copysign(magnitude, x & 0x80 ? -1.0f : 1.0f);
}

inline float e2m1_to_float(uint8_t x) {
  const float magnitude[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return std::copysign(magnitude[x & 7], x & 8 ? -1.0f : 1.0f);
}

inline float ue8m0_to_float(uint8_t x) {  // 2^(x - 127), subnormal for x = 0; 255 is NaN
  return x == 255 ? NAN : std::ldexp(1.0f, x - 127);
}

inline float load_float(const void* p, DType dtype, int64_t i) {
  const char* bytes = static_cast<const char*>(p);
  switch (dtype) {
    case DType::kBF16: return bf16_to_float(load<uint16_t>(bytes + i * 2));
    case DType::kFP16: return fp16_to_float(load<uint16_t>(bytes + i * 2));
    default: return load<float>(bytes + i * 4);
  }
}

}  // namespace kt
