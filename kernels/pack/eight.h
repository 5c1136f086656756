// Eight source weights at a time, as SSE2 vectors (the baseline of x86-64): to float32 from every
// type, and to bf16. The same results as scalar.h, whatever the thread's denormal mode.
#pragma once
#include <emmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kt/types.h"
#include "scalar.h"

namespace kt {

struct Eight {
  __m128 low, high;
};

inline __m128i load_vector(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

// Four fp16 in the low halves of 32-bit lanes.
inline __m128 from_fp16(__m128i h) {
  const __m128i magnitude = _mm_and_si128(h, _mm_set1_epi32(0x7fff));
  const __m128i exponent = _mm_and_si128(h, _mm_set1_epi32(0x7c00));
  const __m128i rebias = _mm_set1_epi32(112 << 23);
  const __m128i special = _mm_cmpeq_epi32(exponent, _mm_set1_epi32(0x7c00));  // infinities, NaN
  __m128i normal = _mm_add_epi32(_mm_slli_epi32(magnitude, 13), rebias);
  normal = _mm_add_epi32(normal, _mm_and_si128(special, rebias));
  const __m128i small = _mm_castps_si128(  // zeros and subnormals count units of 2^-24
      _mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(5.9604644775390625e-8f)));
  const __m128i is_small = _mm_cmpeq_epi32(exponent, _mm_setzero_si128());
  const __m128i value =
      _mm_or_si128(_mm_and_si128(is_small, small), _mm_andnot_si128(is_small, normal));
  const __m128i sign = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x8000)), 16);
  return _mm_castsi128_ps(_mm_or_si128(value, sign));
}

inline Eight eight_from_fp16(__m128i x) {
  const __m128i zero = _mm_setzero_si128();
  // (exponent + 1) & 30 is 0 for exponents 0 and 31, which need more than a new bias.
  const __m128i next =
      _mm_and_si128(_mm_add_epi16(x, _mm_set1_epi16(0x400)), _mm_set1_epi16(0x7800));
  if (_mm_movemask_epi8(_mm_cmpeq_epi16(next, zero))) [[unlikely]]
    return {from_fp16(_mm_unpacklo_epi16(x, zero)), from_fp16(_mm_unpackhi_epi16(x, zero))};
  const __m128i fields = _mm_set1_epi32(int32_t(0x8fffe000)), rebias = _mm_set1_epi32(112 << 23);
  const auto rebiased = [&](__m128i high) {
    return _mm_castsi128_ps(_mm_add_epi32(_mm_and_si128(_mm_srai_epi32(high, 3), fields), rebias));
  };
  return {rebiased(_mm_unpacklo_epi16(zero, x)), rebiased(_mm_unpackhi_epi16(zero, x))};
}

template <DType kType> Eight load_eight(const uint8_t* p) {
  const __m128i zero = _mm_setzero_si128(), x = load_vector(p);
  if constexpr (kType == DType::kBF16)
    return {_mm_castsi128_ps(_mm_unpacklo_epi16(zero, x)),
            _mm_castsi128_ps(_mm_unpackhi_epi16(zero, x))};
  if constexpr (kType == DType::kFP16) return eight_from_fp16(x);
  return {_mm_castsi128_ps(x), _mm_castsi128_ps(load_vector(p + 16))};
}

// Four bf16, sign-extended, to nearest with ties to even; NaN stay NaN.
inline __m128i to_bf16(__m128 x) {
  const __m128i bits = _mm_castps_si128(x);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i rounded = _mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7fff)), odd);
  const __m128i quiet = _mm_or_si128(bits, _mm_set1_epi32(0x400000));
  const __m128i nan = _mm_castps_si128(_mm_cmpunord_ps(x, x));
  return _mm_srai_epi32(_mm_or_si128(_mm_and_si128(nan, quiet), _mm_andnot_si128(nan, rounded)),
                        16);
}

// absmax of n elements of 16 bits; infinite when one is not finite. Magnitudes compare as integers.
inline float absmax_of_halves(const uint8_t* p, DType type, int64_t n) {
  const __m128i magnitude = _mm_set1_epi16(0x7fff);
  __m128i vector = _mm_setzero_si128();
  int64_t k = 0;
  for (; k + 8 <= n; k += 8)
    vector = _mm_max_epi16(vector, _mm_and_si128(load_vector(p + k * 2), magnitude));
  vector = _mm_max_epi16(vector, _mm_srli_si128(vector, 8));
  vector = _mm_max_epi16(vector, _mm_srli_si128(vector, 4));
  vector = _mm_max_epi16(vector, _mm_srli_si128(vector, 2));
  int most = _mm_extract_epi16(vector, 0);
  for (; k < n; ++k) {
    uint16_t bits;
    std::memcpy(&bits, p + k * 2, 2);
    most = std::max(most, bits & 0x7fff);
  }
  if (most >= (type == DType::kBF16 ? 0x7f80 : 0x7c00)) return INFINITY;
  return type == DType::kBF16 ? bf16_to_float(uint16_t(most)) : fp16_to_float(uint16_t(most));
}

inline float absmax_of_floats(const uint8_t* p, int64_t n) {
  const __m128i magnitude = _mm_set1_epi32(0x7fffffff), largest = _mm_set1_epi32(0x7f7fffff);
  __m128 vector[4] = {};
  __m128i beyond = _mm_setzero_si128();  // infinities and NaN
  int64_t k = 0;
  for (; k + 16 <= n; k += 16)
    for (int i = 0; i < 4; ++i) {
      const __m128i bits = _mm_and_si128(load_vector(p + (k + i * 4) * 4), magnitude);
      beyond = _mm_or_si128(beyond, _mm_cmpgt_epi32(bits, largest));
      vector[i] = _mm_max_ps(vector[i], _mm_castsi128_ps(bits));
    }
  if (_mm_movemask_epi8(beyond)) return INFINITY;
  float lane[16], most = 0;
  std::memcpy(lane, vector, sizeof lane);
  for (float x : lane) most = std::max(most, x);
  for (; k < n; ++k) {
    const float x = std::fabs(load_float(p, DType::kFP32, k));
    if (!std::isfinite(x)) return INFINITY;
    most = std::max(most, x);
  }
  return most;
}

inline float absmax_of(const uint8_t* p, DType type, int64_t n) {
  return type == DType::kFP32 ? absmax_of_floats(p, n) : absmax_of_halves(p, type, n);
}

}  // namespace kt
