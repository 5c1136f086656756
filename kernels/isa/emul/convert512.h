// Integer widening and narrowing, float32 to and from int32 and fp16, and the first lane.
#pragma once
#include "base512.h"
#include "memory512.h"

KT_EMUL_UNARY(__m512i, int16_t, __m256i, uint8_t, 32, mm512_cvtepu8_epi16, a.v[i]);
KT_EMUL_UNARY(__m512i, int32_t, __m128i, int8_t, 16, mm512_cvtepi8_epi32, a.v[i]);
KT_EMUL_UNARY(__m512i, int32_t, __m128i, uint8_t, 16, mm512_cvtepu8_epi32, a.v[i]);
KT_EMUL_UNARY(__m512i, int32_t, __m256i, int16_t, 16, mm512_cvtepi16_epi32, a.v[i]);
KT_EMUL_UNARY(__m512i, int32_t, __m256i, uint16_t, 16, mm512_cvtepu16_epi32, a.v[i]);
KT_EMUL_UNARY(__m128i, uint8_t, __m512i, uint32_t, 16, mm512_cvtepi32_epi8, a.v[i]);
KT_EMUL_UNARY(__m256i, uint16_t, __m512i, uint32_t, 16, mm512_cvtepi32_epi16, a.v[i]);
KT_EMUL_UNARY(__m512, float, __m512i, int32_t, 16, mm512_cvtepi32_ps, a.v[i]);

KT_EMUL_FN __m512i kt_mm512_cvtps_epi32(__m512 x) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  return kt_emul::bits<__m512i>(kt_emul::Half{_mm256_cvtps_epi32(h.lo), _mm256_cvtps_epi32(h.hi)});
}
KT_EMUL_FN __m512i kt_mm512_cvttps_epi32(__m512 x) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  return kt_emul::bits<__m512i>(
      kt_emul::Half{_mm256_cvttps_epi32(h.lo), _mm256_cvttps_epi32(h.hi)});
}
// The rounding of vcvtps2ph is part of the instruction, so there is one call per mode.
#define KT_EMUL_TO_HALF(mode)    \
  return kt_emul::bits<__m256i>( \
      kt_emul::Pair{{_mm256_cvtps_ph(h.lo, mode), _mm256_cvtps_ph(h.hi, mode)}})
KT_EMUL_FN __m256i kt_mm512_cvtps_ph(__m512 x, int mode) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  switch (mode & 7) {
    case _MM_FROUND_TO_NEAREST_INT: KT_EMUL_TO_HALF(_MM_FROUND_TO_NEAREST_INT);
    case _MM_FROUND_TO_NEG_INF: KT_EMUL_TO_HALF(_MM_FROUND_TO_NEG_INF);
    case _MM_FROUND_TO_POS_INF: KT_EMUL_TO_HALF(_MM_FROUND_TO_POS_INF);
    case _MM_FROUND_TO_ZERO: KT_EMUL_TO_HALF(_MM_FROUND_TO_ZERO);
    default: KT_EMUL_TO_HALF(_MM_FROUND_CUR_DIRECTION);
  }
}
#undef KT_EMUL_TO_HALF
KT_EMUL_FN __m512 kt_mm512_cvtph_ps(__m256i x) {
  const auto a = kt_emul::bits<kt_emul::Pair>(x);
  return kt_emul::bits<__m512>(kt_emul::HalfPs{_mm256_cvtph_ps(a.v[0]), _mm256_cvtph_ps(a.v[1])});
}
KT_EMUL_FN void kt_mm512_mask_cvtepi32_storeu_epi8(void* p, __mmask16 k, __m512i x) {
  kt_mm_mask_storeu_epi8(p, k, kt_mm512_cvtepi32_epi8(x));
}
KT_EMUL_FN void kt_mm512_mask_cvtepi32_storeu_epi16(void* p, __mmask16 k, __m512i x) {
  kt_mm256_mask_storeu_epi16(p, k, kt_mm512_cvtepi32_epi16(x));
}
KT_EMUL_FN float kt_mm512_cvtss_f32(__m512 x) { return x[0]; }
KT_EMUL_FN int kt_mm512_cvtsi512_si32(__m512i x) {
  return kt_emul::bits<kt_emul::Lanes<int32_t, 16>>(x).v[0];
}

// The names used by the kernels.
#undef _mm512_cvtepi16_epi32
#define _mm512_cvtepi16_epi32 kt_mm512_cvtepi16_epi32
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 kt_mm512_cvtepi32_epi16
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 kt_mm512_cvtepi32_epi8
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps kt_mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 kt_mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 kt_mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16 kt_mm512_cvtepu8_epi16
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 kt_mm512_cvtepu8_epi32
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps kt_mm512_cvtph_ps
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 kt_mm512_cvtps_epi32
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph kt_mm512_cvtps_ph
#undef _mm512_cvtsi512_si32
#define _mm512_cvtsi512_si32 kt_mm512_cvtsi512_si32
#undef _mm512_cvtss_f32
#define _mm512_cvtss_f32 kt_mm512_cvtss_f32
#undef _mm512_cvttps_epi32
#define _mm512_cvttps_epi32 kt_mm512_cvttps_epi32
#undef _mm512_mask_cvtepi32_storeu_epi16
#define _mm512_mask_cvtepi32_storeu_epi16 kt_mm512_mask_cvtepi32_storeu_epi16
#undef _mm512_mask_cvtepi32_storeu_epi8
#define _mm512_mask_cvtepi32_storeu_epi8 kt_mm512_mask_cvtepi32_storeu_epi8
