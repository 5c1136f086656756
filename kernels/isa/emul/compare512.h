// Comparisons into masks.
#pragma once
#include "base512.h"

namespace kt_emul {
namespace {

// Comparison predicates of _mm512_cmp_ep*_mask.
template <class T> inline __attribute__((always_inline)) bool compare(T x, T y, int predicate) {
  switch (predicate & 7) {
    case 0: return x == y;
    case 1: return x < y;
    case 2: return x <= y;
    case 3: return false;
    case 4: return x != y;
    case 5: return x >= y;
    case 6: return x > y;
    default: return true;
  }
}

}  // namespace
}  // namespace kt_emul

#define KT_EMUL_COMPARE(T, N, M, suffix)                                                        \
  KT_EMUL_FN M kt_mm512_cmp_##suffix##_mask(__m512i x, __m512i y, int predicate) {              \
    const auto a = kt_emul::bits<kt_emul::Lanes<T, N>>(x),                                      \
               b = kt_emul::bits<kt_emul::Lanes<T, N>>(y);                                      \
    M r = 0;                                                                                    \
    for (int i = 0; i < N; ++i)                                                                 \
      r = static_cast<M>(r | static_cast<M>(kt_emul::compare(a.v[i], b.v[i], predicate)) << i); \
    return r;                                                                                   \
  }                                                                                             \
  KT_EMUL_FN M kt_mm512_cmpeq_##suffix##_mask(__m512i x, __m512i y) {                           \
    return kt_mm512_cmp_##suffix##_mask(x, y, 0);                                               \
  }                                                                                             \
  KT_EMUL_FN M kt_mm512_cmplt_##suffix##_mask(__m512i x, __m512i y) {                           \
    return kt_mm512_cmp_##suffix##_mask(x, y, 1);                                               \
  }                                                                                             \
  KT_EMUL_FN M kt_mm512_cmple_##suffix##_mask(__m512i x, __m512i y) {                           \
    return kt_mm512_cmp_##suffix##_mask(x, y, 2);                                               \
  }                                                                                             \
  KT_EMUL_FN M kt_mm512_cmpneq_##suffix##_mask(__m512i x, __m512i y) {                          \
    return kt_mm512_cmp_##suffix##_mask(x, y, 4);                                               \
  }                                                                                             \
  KT_EMUL_FN M kt_mm512_cmpge_##suffix##_mask(__m512i x, __m512i y) {                           \
    return kt_mm512_cmp_##suffix##_mask(x, y, 5);                                               \
  }                                                                                             \
  KT_EMUL_FN M kt_mm512_cmpgt_##suffix##_mask(__m512i x, __m512i y) {                           \
    return kt_mm512_cmp_##suffix##_mask(x, y, 6);                                               \
  }
KT_EMUL_COMPARE(int8_t, 64, __mmask64, epi8);
KT_EMUL_COMPARE(uint8_t, 64, __mmask64, epu8);
KT_EMUL_COMPARE(int16_t, 32, __mmask32, epi16);
KT_EMUL_COMPARE(uint16_t, 32, __mmask32, epu16);
KT_EMUL_COMPARE(int32_t, 16, __mmask16, epi32);
KT_EMUL_COMPARE(uint32_t, 16, __mmask16, epu32);

KT_EMUL_FN __mmask16 kt_mm512_cmp_ps_mask(__m512 x, __m512 y, int predicate) {
  const auto a = kt_emul::bits<kt_emul::Lanes<float, 16>>(x),
             b = kt_emul::bits<kt_emul::Lanes<float, 16>>(y);
  unsigned r = 0;
  for (int i = 0; i < 16; ++i) {
    const float u = a.v[i], v = b.v[i];
    const bool unordered = __builtin_isunordered(u, v);
    bool hit = false;
    switch (predicate & 15) {                      // bit 4 only selects which NaNs signal
      case 0: hit = u == v; break;                 // EQ
      case 1: hit = u < v; break;                  // LT
      case 2: hit = u <= v; break;                 // LE
      case 3: hit = unordered; break;              // UNORD
      case 4: hit = !(u == v); break;              // NEQ, true for NaN
      case 5: hit = !(u < v); break;               // NLT
      case 6: hit = !(u <= v); break;              // NLE
      case 7: hit = !unordered; break;             // ORD
      case 8: hit = unordered || u == v; break;    // EQ, true for NaN
      case 9: hit = unordered || u < v; break;     // NGE
      case 10: hit = unordered || u <= v; break;   // NGT
      case 11: break;                              // FALSE
      case 12: hit = !unordered && u != v; break;  // NEQ, false for NaN
      case 13: hit = u >= v; break;                // GE
      case 14: hit = u > v; break;                 // GT
      default: hit = true;                         // TRUE
    }
    r |= static_cast<unsigned>(hit) << i;
  }
  return static_cast<__mmask16>(r);
}
KT_EMUL_FN __mmask16 kt_mm512_testn_epi32_mask(__m512i x, __m512i y) {
  return kt_mm512_cmp_epi32_mask(_mm512_and_si512(x, y), __m512i{}, 0);
}
KT_EMUL_FN __mmask64 kt_mm512_testn_epi8_mask(__m512i x, __m512i y) {
  return kt_mm512_cmp_epi8_mask(_mm512_and_si512(x, y), __m512i{}, 0);
}

// The names used by the kernels.
#undef _mm512_cmp_epi16_mask
#define _mm512_cmp_epi16_mask kt_mm512_cmp_epi16_mask
#undef _mm512_cmp_epi32_mask
#define _mm512_cmp_epi32_mask kt_mm512_cmp_epi32_mask
#undef _mm512_cmp_epi8_mask
#define _mm512_cmp_epi8_mask kt_mm512_cmp_epi8_mask
#undef _mm512_cmp_epu16_mask
#define _mm512_cmp_epu16_mask kt_mm512_cmp_epu16_mask
#undef _mm512_cmp_epu32_mask
#define _mm512_cmp_epu32_mask kt_mm512_cmp_epu32_mask
#undef _mm512_cmp_epu8_mask
#define _mm512_cmp_epu8_mask kt_mm512_cmp_epu8_mask
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask kt_mm512_cmp_ps_mask
#undef _mm512_cmpeq_epi16_mask
#define _mm512_cmpeq_epi16_mask kt_mm512_cmpeq_epi16_mask
#undef _mm512_cmpeq_epi32_mask
#define _mm512_cmpeq_epi32_mask kt_mm512_cmpeq_epi32_mask
#undef _mm512_cmpeq_epi8_mask
#define _mm512_cmpeq_epi8_mask kt_mm512_cmpeq_epi8_mask
#undef _mm512_cmpeq_epu16_mask
#define _mm512_cmpeq_epu16_mask kt_mm512_cmpeq_epu16_mask
#undef _mm512_cmpeq_epu32_mask
#define _mm512_cmpeq_epu32_mask kt_mm512_cmpeq_epu32_mask
#undef _mm512_cmpeq_epu8_mask
#define _mm512_cmpeq_epu8_mask kt_mm512_cmpeq_epu8_mask
#undef _mm512_cmpge_epi16_mask
#define _mm512_cmpge_epi16_mask kt_mm512_cmpge_epi16_mask
#undef _mm512_cmpge_epi32_mask
#define _mm512_cmpge_epi32_mask kt_mm512_cmpge_epi32_mask
#undef _mm512_cmpge_epi8_mask
#define _mm512_cmpge_epi8_mask kt_mm512_cmpge_epi8_mask
#undef _mm512_cmpge_epu16_mask
#define _mm512_cmpge_epu16_mask kt_mm512_cmpge_epu16_mask
#undef _mm512_cmpge_epu32_mask
#define _mm512_cmpge_epu32_mask kt_mm512_cmpge_epu32_mask
#undef _mm512_cmpge_epu8_mask
#define _mm512_cmpge_epu8_mask kt_mm512_cmpge_epu8_mask
#undef _mm512_cmpgt_epi16_mask
#define _mm512_cmpgt_epi16_mask kt_mm512_cmpgt_epi16_mask
#undef _mm512_cmpgt_epi32_mask
#define _mm512_cmpgt_epi32_mask kt_mm512_cmpgt_epi32_mask
#undef _mm512_cmpgt_epi8_mask
#define _mm512_cmpgt_epi8_mask kt_mm512_cmpgt_epi8_mask
#undef _mm512_cmpgt_epu16_mask
#define _mm512_cmpgt_epu16_mask kt_mm512_cmpgt_epu16_mask
#undef _mm512_cmpgt_epu32_mask
#define _mm512_cmpgt_epu32_mask kt_mm512_cmpgt_epu32_mask
#undef _mm512_cmpgt_epu8_mask
#define _mm512_cmpgt_epu8_mask kt_mm512_cmpgt_epu8_mask
#undef _mm512_cmple_epi16_mask
#define _mm512_cmple_epi16_mask kt_mm512_cmple_epi16_mask
#undef _mm512_cmple_epi32_mask
#define _mm512_cmple_epi32_mask kt_mm512_cmple_epi32_mask
#undef _mm512_cmple_epi8_mask
#define _mm512_cmple_epi8_mask kt_mm512_cmple_epi8_mask
#undef _mm512_cmple_epu16_mask
#define _mm512_cmple_epu16_mask kt_mm512_cmple_epu16_mask
#undef _mm512_cmple_epu32_mask
#define _mm512_cmple_epu32_mask kt_mm512_cmple_epu32_mask
#undef _mm512_cmple_epu8_mask
#define _mm512_cmple_epu8_mask kt_mm512_cmple_epu8_mask
#undef _mm512_cmplt_epi16_mask
#define _mm512_cmplt_epi16_mask kt_mm512_cmplt_epi16_mask
#undef _mm512_cmplt_epi32_mask
#define _mm512_cmplt_epi32_mask kt_mm512_cmplt_epi32_mask
#undef _mm512_cmplt_epi8_mask
#define _mm512_cmplt_epi8_mask kt_mm512_cmplt_epi8_mask
#undef _mm512_cmplt_epu16_mask
#define _mm512_cmplt_epu16_mask kt_mm512_cmplt_epu16_mask
#undef _mm512_cmplt_epu32_mask
#define _mm512_cmplt_epu32_mask kt_mm512_cmplt_epu32_mask
#undef _mm512_cmplt_epu8_mask
#define _mm512_cmplt_epu8_mask kt_mm512_cmplt_epu8_mask
#undef _mm512_cmpneq_epi16_mask
#define _mm512_cmpneq_epi16_mask kt_mm512_cmpneq_epi16_mask
#undef _mm512_cmpneq_epi32_mask
#define _mm512_cmpneq_epi32_mask kt_mm512_cmpneq_epi32_mask
#undef _mm512_cmpneq_epi8_mask
#define _mm512_cmpneq_epi8_mask kt_mm512_cmpneq_epi8_mask
#undef _mm512_cmpneq_epu16_mask
#define _mm512_cmpneq_epu16_mask kt_mm512_cmpneq_epu16_mask
#undef _mm512_cmpneq_epu32_mask
#define _mm512_cmpneq_epu32_mask kt_mm512_cmpneq_epu32_mask
#undef _mm512_cmpneq_epu8_mask
#define _mm512_cmpneq_epu8_mask kt_mm512_cmpneq_epu8_mask
#undef _mm512_testn_epi32_mask
#define _mm512_testn_epi32_mask kt_mm512_testn_epi32_mask
#undef _mm512_testn_epi8_mask
#define _mm512_testn_epi8_mask kt_mm512_testn_epi8_mask
