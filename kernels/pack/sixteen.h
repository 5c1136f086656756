// Sixteen source weights at a time, as AVX2 vectors (the package's minimum): conversion to float32
// from every type and to bf16, and the largest magnitude of many. The results are those of
// scalar.h, in any denormal mode of the thread.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kt/types.h"
#include "scalar.h"

namespace kt {

// Elements 0-3 and 8-11, and 4-7 and 12-15: packing the two to 16 bits puts them in order.
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

// Eight bf16, sign-extended, rounded to nearest with ties to even; NaN stays NaN.
inline __m256i to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srai_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

// Magnitudes of finite numbers compare like integers. This is the smallest that is not finite.
template <DType kType>
constexpr uint32_t kBeyondFinite = kType == DType::kBF16   ? 0x7f80
                                   : kType == DType::kFP16 ? 0x7c00
                                                           : 0x7f800000;

// The largest of the 16-bit numbers in a vector.
inline uint32_t largest(__m256i x, uint16_t) {
  const __m128i ones = _mm_set1_epi32(-1);  // minpos finds the minimum
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return 0xffff & ~uint32_t(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, ones))));
}

// The largest of the 32-bit numbers in a vector.
inline uint32_t largest(__m256i x, uint32_t) {
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  four = _mm_max_epu32(four, _mm_srli_si128(four, 8));
  four = _mm_max_epu32(four, _mm_srli_si128(four, 4));
  return uint32_t(_mm_cvtsi128_si32(four));
}

// The bits of the largest magnitude of n elements; at least kBeyondFinite if one is not finite.
// Inlined, because other code must not use a symbol compiled for AVX2.
template <DType kType> [[gnu::always_inline]] inline uint32_t most_of(const uint8_t* p, int64_t n) {
  constexpr bool kHalf = kType != DType::kFP32;
  using Bits = std::conditional_t<kHalf, uint16_t, uint32_t>;
  constexpr uint32_t kMagnitude = kHalf ? 0x7fff : 0x7fffffff;
  constexpr int64_t kSize = sizeof(Bits), kAtOnce = 64 / kSize;
  const __m256i mask = _mm256_set1_epi32(kHalf ? 0x7fff7fff : 0x7fffffff);
  const auto larger = [](__m256i a, __m256i b) {
    return kHalf ? _mm256_max_epu16(a, b) : _mm256_max_epu32(a, b);
  };
  __m256i most = _mm256_setzero_si256(), other = most;
  int64_t k = 0;
  for (; k + kAtOnce <= n; k += kAtOnce) {
    most = larger(most, _mm256_and_si256(load_vector(p + k * kSize), mask));
    other = larger(other, _mm256_and_si256(load_vector(p + k * kSize + 32), mask));
  }
  uint32_t result = largest(larger(most, other), Bits{});
  for (; k < n; ++k) result = std::max(result, load<Bits>(p + k * kSize) & kMagnitude);
  return result;
}

// Converts eight magnitudes from bits to float32.
template <DType kType> __m256 magnitudes(const uint32_t* bits) {
  const __m256i x = load_vector(bits);
  if constexpr (kType == DType::kBF16) return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  if constexpr (kType == DType::kFP16)
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  return _mm256_castsi256_ps(x);
}

}  // namespace kt
