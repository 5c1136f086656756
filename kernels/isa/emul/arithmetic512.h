// Shifts of 32-bit lanes, absolute value, scaling by powers of two.
#pragma once
#include "base512.h"

namespace kt_emul {
namespace {

inline float scale_by_power(float a, float b) {
  // a * 2^floor(b). The double product is exact, so the conversion is the only rounding. 300 is
  // beyond every float exponent, including denormals.
  const float inf = __builtin_inff();
  if (b != b) return a != a ? a + b : b + b;
  if (a != a) {  // an infinite b wins over a quiet NaN, but not over a signalling one
    const bool quiet = bits<uint32_t>(a) & 0x00400000u;
    return !quiet || (b != inf && b != -inf) ? a + a : b == inf ? inf : 0.0f;
  }
  if (b == inf) return a == 0 ? __builtin_nanf("") : a * inf;
  if (b == -inf) return a == inf || a == -inf ? __builtin_nanf("") : a * 0.0f;
  const float clamped = b > 300 ? 300.0f : b < -300 ? -300.0f : b;
  int64_t e = static_cast<int64_t>(clamped);
  e -= clamped < static_cast<float>(e);  // floor
  return static_cast<float>(a * bits<double>((e + 1023) << 52));
}

}  // namespace
}  // namespace kt_emul

KT_EMUL_FN __m512i kt_mm512_srai_epi32(__m512i x, unsigned n) {
  const auto h = kt_emul::bits<kt_emul::Half>(x);
  const __m128i count = _mm_cvtsi32_si128(static_cast<int>(n));
  return kt_emul::bits<__m512i>(
      kt_emul::Half{_mm256_sra_epi32(h.lo, count), _mm256_sra_epi32(h.hi, count)});
}
KT_EMUL_FN __m512i kt_mm512_srav_epi32(__m512i x, __m512i n) {
  const auto h = kt_emul::bits<kt_emul::Half>(x), c = kt_emul::bits<kt_emul::Half>(n);
  return kt_emul::bits<__m512i>(
      kt_emul::Half{_mm256_srav_epi32(h.lo, c.lo), _mm256_srav_epi32(h.hi, c.hi)});
}
#define KT_EMUL_MASKED_SHIFT(name, shift)                                                    \
  KT_EMUL_FN __m512i kt_mm512_mask_##name(__m512i src, __mmask16 k, __m512i x, unsigned n) { \
    return _mm512_mask_mov_epi32(src, k, shift(x, n));                                       \
  }                                                                                          \
  KT_EMUL_FN __m512i kt_mm512_maskz_##name(__mmask16 k, __m512i x, unsigned n) {             \
    return _mm512_maskz_mov_epi32(k, shift(x, n));                                           \
  }
KT_EMUL_MASKED_SHIFT(slli_epi32, _mm512_slli_epi32);
KT_EMUL_MASKED_SHIFT(srli_epi32, _mm512_srli_epi32);
KT_EMUL_MASKED_SHIFT(srai_epi32, kt_mm512_srai_epi32);

KT_EMUL_FN __m512 kt_mm512_abs_ps(__m512 x) {
  return kt_emul::bits<__m512>(
      _mm512_and_si512(kt_emul::bits<__m512i>(x), _mm512_set1_epi32(0x7fffffff)));
}
KT_EMUL_FN __m512 kt_mm512_scalef_ps(__m512 x, __m512 y) {
  const auto a = kt_emul::bits<kt_emul::Lanes<float, 16>>(x),
             b = kt_emul::bits<kt_emul::Lanes<float, 16>>(y);
  kt_emul::Lanes<float, 16> r;
  for (int i = 0; i < 16; ++i) r.v[i] = kt_emul::scale_by_power(a.v[i], b.v[i]);
  return kt_emul::bits<__m512>(r);
}

// The names the kernels use.
#undef _mm512_abs_ps
#define _mm512_abs_ps kt_mm512_abs_ps
#undef _mm512_mask_slli_epi32
#define _mm512_mask_slli_epi32 kt_mm512_mask_slli_epi32
#undef _mm512_mask_srai_epi32
#define _mm512_mask_srai_epi32 kt_mm512_mask_srai_epi32
#undef _mm512_mask_srli_epi32
#define _mm512_mask_srli_epi32 kt_mm512_mask_srli_epi32
#undef _mm512_maskz_slli_epi32
#define _mm512_maskz_slli_epi32 kt_mm512_maskz_slli_epi32
#undef _mm512_maskz_srai_epi32
#define _mm512_maskz_srai_epi32 kt_mm512_maskz_srai_epi32
#undef _mm512_maskz_srli_epi32
#define _mm512_maskz_srli_epi32 kt_mm512_maskz_srli_epi32
#undef _mm512_scalef_ps
#define _mm512_scalef_ps kt_mm512_scalef_ps
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 kt_mm512_srai_epi32
#undef _mm512_srav_epi32
#define _mm512_srav_epi32 kt_mm512_srav_epi32
