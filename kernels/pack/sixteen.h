// Sixteen source weights at a time, as AVX2 vectors (the floor of the package): to float32 from
// every type, and to bf16; and the largest magnitude of many. The same results as scalar.h,
// whatever the thread's denormal mode.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kt/types.h"

namespace kt {

// Elements 0-3 and 8-11, 4-7 and 12-15: packing the two to 16 bits puts them in order.
struct Sixteen {
  __m256 even, odd;
};

inline __m256i load_vector(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

template <DType kType> Sixteen load_sixteen(const uint8_t* p) {
  const __m256i x = load_vector(p);
  if constexpr (kType == DType::kBF16) {
    const __m256i zero = _mm256_setzero_si256();
    return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x)),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x))};
  }
  if constexpr (kType == DType::kFP16) {
    const __m256i quarters = _mm256_permute4x64_epi64(x, 0xd8);  // 0, 2, 1, 3
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(quarters)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(quarters, 1))};
  }
  const __m256i y = load_vector(p + 32);
  return {_mm256_castsi256_ps(_mm256_permute2x128_si256(x, y, 0x20)),
          _mm256_castsi256_ps(_mm256_permute2x128_si256(x, y, 0x31))};
}

// Eight bf16, sign-extended, to nearest with ties to even; NaN stay NaN.
inline __m256i to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srai_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

// Magnitudes of finite numbers compare as integers do; this is the least that is none.
template <DType kType>
constexpr uint32_t kBeyondFinite = kType == DType::kBF16   ? 0x7f80
                                   : kType == DType::kFP16 ? 0x7c00
                                                           : 0x7f800000;

// Largest of eight 16-bit numbers: minpos finds the smallest.
inline uint32_t largest_half(__m128i x) {
  const __m128i ones = _mm_set1_epi32(-1);
  return 0xffff & ~uint32_t(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(x, ones))));
}

inline uint32_t most_of_halves(const uint8_t* p, int64_t n) {
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  __m256i most = _mm256_setzero_si256(), other = most;
  int64_t k = 0;
  for (; k + 32 <= n; k += 32) {
    most = _mm256_max_epu16(most, _mm256_and_si256(load_vector(p + k * 2), mask));
    other = _mm256_max_epu16(other, _mm256_and_si256(load_vector(p + k * 2 + 32), mask));
  }
  most = _mm256_max_epu16(most, other);
  uint32_t result =
      largest_half(_mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1)));
  for (; k < n; ++k) {
    uint16_t bits;
    std::memcpy(&bits, p + k * 2, 2);
    result = std::max(result, uint32_t(bits & 0x7fff));
  }
  return result;
}

inline uint32_t most_of_floats(const uint8_t* p, int64_t n) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256(), other = most;
  int64_t k = 0;
  for (; k + 16 <= n; k += 16) {
    most = _mm256_max_epu32(most, _mm256_and_si256(load_vector(p + k * 4), mask));
    other = _mm256_max_epu32(other, _mm256_and_si256(load_vector(p + k * 4 + 32), mask));
  }
  most = _mm256_max_epu32(most, other);
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  four = _mm_max_epu32(four, _mm_srli_si128(four, 8));
  four = _mm_max_epu32(four, _mm_srli_si128(four, 4));
  uint32_t result = uint32_t(_mm_cvtsi128_si32(four));
  for (; k < n; ++k) {
    uint32_t bits;
    std::memcpy(&bits, p + k * 4, 4);
    result = std::max(result, bits & 0x7fffffff);
  }
  return result;
}

// The bits of the largest magnitude of n elements; kBeyondFinite or more when one is not finite.
template <DType kType> uint32_t most_of(const uint8_t* p, int64_t n) {
  return kType == DType::kFP32 ? most_of_floats(p, n) : most_of_halves(p, n);
}

// Eight magnitudes, by their bits, as float32.
template <DType kType> __m256 magnitudes(const uint32_t* bits) {
  const __m256i x = load_vector(bits);
  if constexpr (kType == DType::kBF16) return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  if constexpr (kType == DType::kFP16)
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  return _mm256_castsi256_ps(x);
}

}  // namespace kt
