// Shuffles by an immediate, and parts of vectors.
#pragma once
#include "base512.h"

#define KT_EMUL_SHUFFLE(V, T, N, name, from)                                \
  KT_EMUL_FN V kt_##name(V x, int imm) {                                    \
    const auto a = kt_emul::bits<kt_emul::Lanes<T, N>>(x);                  \
    kt_emul::Lanes<T, N> r;                                                 \
    for (int i = 0; i < N; ++i) r.v[i] = a.v[(i & ~3) + (imm >> (from)&3)]; \
    return kt_emul::bits<V>(r);                                             \
  }
KT_EMUL_SHUFFLE(__m512i, int32_t, 16, mm512_shuffle_epi32, (i & 3) * 2);
KT_EMUL_SHUFFLE(__m512, float, 16, mm512_permute_ps, (i & 3) * 2);
KT_EMUL_SHUFFLE(__m512i, int64_t, 8, mm512_permutex_epi64, (i & 3) * 2);
#define KT_EMUL_SHUFFLE_QUARTERS(V, name)                                                        \
  KT_EMUL_FN V kt_##name(V x, V y, int imm) {                                                    \
    const auto a = kt_emul::bits<kt_emul::Quarters>(x), b = kt_emul::bits<kt_emul::Quarters>(y); \
    return kt_emul::bits<V>(kt_emul::Quarters{                                                   \
        {a.v[imm & 3], a.v[imm >> 2 & 3], b.v[imm >> 4 & 3], b.v[imm >> 6 & 3]}});               \
  }
KT_EMUL_SHUFFLE_QUARTERS(__m512, mm512_shuffle_f32x4);
KT_EMUL_SHUFFLE_QUARTERS(__m512i, mm512_shuffle_i32x4);
KT_EMUL_SHUFFLE_QUARTERS(__m512i, mm512_shuffle_i64x2);

// ---- Parts of vectors.
KT_EMUL_FN __m512i kt_mm512_broadcast_i32x8(__m256i x) {
  return kt_emul::bits<__m512i>(kt_emul::Half{x, x});
}
KT_EMUL_FN __m512i kt_mm512_broadcast_i64x2(__m128i x) { return _mm512_broadcast_i32x4(x); }
KT_EMUL_FN __m512i kt_mm512_zextsi256_si512(__m256i x) {
  return kt_emul::bits<__m512i>(kt_emul::Half{x, __m256i{}});
}
KT_EMUL_FN __m512i kt_mm512_zextsi128_si512(__m128i x) {
  return kt_emul::bits<__m512i>(kt_emul::Quarters{{x, __m128i{}, __m128i{}, __m128i{}}});
}
KT_EMUL_FN __m256i kt_mm512_extracti32x8_epi32(__m512i x, int at) {
  const auto h = kt_emul::bits<kt_emul::Half>(x);
  return at & 1 ? h.hi : h.lo;
}
KT_EMUL_FN __m256 kt_mm512_extractf32x8_ps(__m512 x, int at) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  return at & 1 ? h.hi : h.lo;
}

// The names used by the kernels.
#undef _mm512_broadcast_i32x8
#define _mm512_broadcast_i32x8 kt_mm512_broadcast_i32x8
#undef _mm512_broadcast_i64x2
#define _mm512_broadcast_i64x2 kt_mm512_broadcast_i64x2
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps kt_mm512_extractf32x8_ps
#undef _mm512_extracti32x8_epi32
#define _mm512_extracti32x8_epi32 kt_mm512_extracti32x8_epi32
#undef _mm512_permute_ps
#define _mm512_permute_ps kt_mm512_permute_ps
#undef _mm512_permutex_epi64
#define _mm512_permutex_epi64 kt_mm512_permutex_epi64
#undef _mm512_shuffle_epi32
#define _mm512_shuffle_epi32 kt_mm512_shuffle_epi32
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 kt_mm512_shuffle_f32x4
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 kt_mm512_shuffle_i32x4
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2 kt_mm512_shuffle_i64x2
#undef _mm512_zextsi128_si512
#define _mm512_zextsi128_si512 kt_mm512_zextsi128_si512
#undef _mm512_zextsi256_si512
#define _mm512_zextsi256_si512 kt_mm512_zextsi256_si512
