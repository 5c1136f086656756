// Integer dot products.
#pragma once
#include "base512.h"

namespace kt_emul {
namespace {

inline __attribute__((always_inline)) __m256i dpbusd(__m256i acc, __m256i a, __m256i b) {
  // Even and odd bytes as 16-bit lanes: vpmaddwd is exact on them, whereas vpmaddubsw saturates.
  const __m256i low = _mm256_set1_epi16(0x00ff);
  const __m256i even =
      _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}

}  // namespace
}  // namespace kt_emul

KT_EMUL_FN __m256i kt_mm256_dpbusd_epi32(__m256i acc, __m256i a, __m256i b) {
  return kt_emul::dpbusd(acc, a, b);
}
KT_EMUL_FN __m512i kt_mm512_dpbusd_epi32(__m512i acc, __m512i a, __m512i b) {
  const auto s = kt_emul::bits<kt_emul::Half>(acc), x = kt_emul::bits<kt_emul::Half>(a),
             y = kt_emul::bits<kt_emul::Half>(b);
  return kt_emul::bits<__m512i>(
      kt_emul::Half{kt_emul::dpbusd(s.lo, x.lo, y.lo), kt_emul::dpbusd(s.hi, x.hi, y.hi)});
}
KT_EMUL_FN __m512i kt_mm512_mask_dpbusd_epi32(__m512i acc, __mmask16 k, __m512i a, __m512i b) {
  return _mm512_mask_mov_epi32(acc, k, kt_mm512_dpbusd_epi32(acc, a, b));
}
KT_EMUL_FN __m512i kt_mm512_maskz_dpbusd_epi32(__mmask16 k, __m512i acc, __m512i a, __m512i b) {
  return _mm512_maskz_mov_epi32(k, kt_mm512_dpbusd_epi32(acc, a, b));
}
// SIMDe 0.7.4's alias of madd_epi16 takes four arguments.
KT_EMUL_FN __m512i kt_mm512_madd_epi16(__m512i a, __m512i b) {
  const auto x = kt_emul::bits<kt_emul::Half>(a), y = kt_emul::bits<kt_emul::Half>(b);
  return kt_emul::bits<__m512i>(
      kt_emul::Half{_mm256_madd_epi16(x.lo, y.lo), _mm256_madd_epi16(x.hi, y.hi)});
}
KT_EMUL_FN __m512i kt_mm512_dpwssd_epi32(__m512i acc, __m512i a, __m512i b) {
  return _mm512_add_epi32(acc, kt_mm512_madd_epi16(a, b));
}

// The names used by the kernels.
#undef _mm256_dpbusd_epi32
#define _mm256_dpbusd_epi32 kt_mm256_dpbusd_epi32
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 kt_mm512_dpbusd_epi32
#undef _mm512_dpwssd_epi32
#define _mm512_dpwssd_epi32 kt_mm512_dpwssd_epi32
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 kt_mm512_madd_epi16
#undef _mm512_mask_dpbusd_epi32
#define _mm512_mask_dpbusd_epi32 kt_mm512_mask_dpbusd_epi32
#undef _mm512_maskz_dpbusd_epi32
#define _mm512_maskz_dpbusd_epi32 kt_mm512_maskz_dpbusd_epi32
