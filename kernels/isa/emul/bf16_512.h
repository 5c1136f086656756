// bf16 conversions and dot products, including the parts that emul_amx.h shares.
#pragma once
#include "base512.h"
#include "convert512.h"

namespace kt_emul {
namespace {

struct PairBh {
  __m256bh lo, hi;
};

constexpr unsigned kFlushDenormals = 0x9fc0;  // MXCSR: FTZ, DAZ, nearest-even, exceptions masked

inline __attribute__((always_inline)) __m256i bf16_even(__m256i x) {
  return _mm256_slli_epi32(x, 16);
}
inline __attribute__((always_inline)) __m256i bf16_odd(__m256i x) {
  return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
}

// One asm block, so that the compiler cannot move other arithmetic between the MXCSR writes.
inline __attribute__((always_inline)) HalfPs dpbf16(HalfPs acc, Half a, Half b) {
  unsigned saved = 0;
  const unsigned mode = kFlushDenormals;
  asm("vstmxcsr %[saved]\n\t"
      "vldmxcsr %[mode]\n\t"
      "vfmadd231ps %[a0o], %[b0o], %[lo]\n\t"
      "vfmadd231ps %[a1o], %[b1o], %[hi]\n\t"
      "vfmadd231ps %[a0e], %[b0e], %[lo]\n\t"
      "vfmadd231ps %[a1e], %[b1e], %[hi]\n\t"
      "vldmxcsr %[saved]"
      : [lo] "+&x"(acc.lo), [hi] "+&x"(acc.hi), [saved] "+m"(saved)
      : [mode] "m"(mode), [a0o] "x"(bf16_odd(a.lo)), [b0o] "x"(bf16_odd(b.lo)),
        [a1o] "x"(bf16_odd(a.hi)), [b1o] "x"(bf16_odd(b.hi)), [a0e] "x"(bf16_even(a.lo)),
        [b0e] "x"(bf16_even(b.lo)), [a1e] "x"(bf16_even(a.hi)), [b1e] "x"(bf16_even(b.hi)));
  return acc;
}

inline __attribute__((always_inline)) __m256i to_bf16(__m256 x) {  // in the low 16 bits of lanes
  const __m256i u = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), one);
  const __m256i bias = _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, bias), 16);
  const __m256i upper = _mm256_srli_epi32(u, 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i zero = _mm256_and_si256(upper, _mm256_set1_epi32(0x8000));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
  return _mm256_blendv_epi8(_mm256_blendv_epi8(rounded, quiet, nan), zero, tiny);
}

inline __attribute__((always_inline)) __m128i narrow16(__m256i x) {  // low halves of 8 lanes
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), x);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

}  // namespace
}  // namespace kt_emul

KT_EMUL_FN __m128bh kt_mm256_cvtneps_pbh(__m256 x) {
  return kt_emul::bits<__m128bh>(kt_emul::narrow16(kt_emul::to_bf16(x)));
}
KT_EMUL_FN __m256bh kt_mm512_cvtneps_pbh(__m512 x) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  return kt_emul::bits<__m256bh>(kt_emul::Pair{
      {kt_emul::narrow16(kt_emul::to_bf16(h.lo)), kt_emul::narrow16(kt_emul::to_bf16(h.hi))}});
}
KT_EMUL_FN __m512bh kt_mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  return kt_emul::bits<__m512bh>(
      kt_emul::PairBh{kt_mm512_cvtneps_pbh(low), kt_mm512_cvtneps_pbh(high)});
}
KT_EMUL_FN __m512 kt_mm512_cvtpbh_ps(__m256bh x) {
  return kt_emul::bits<__m512>(
      _mm512_slli_epi32(kt_mm512_cvtepu16_epi32(kt_emul::bits<__m256i>(x)), 16));
}
KT_EMUL_FN __m512 kt_mm512_dpbf16_ps(__m512 acc, __m512bh a, __m512bh b) {
  return kt_emul::bits<__m512>(kt_emul::dpbf16(kt_emul::bits<kt_emul::HalfPs>(acc),
                                               kt_emul::bits<kt_emul::Half>(a),
                                               kt_emul::bits<kt_emul::Half>(b)));
}

// The names used by the kernels.
#undef _mm256_cvtneps_pbh
#define _mm256_cvtneps_pbh kt_mm256_cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh kt_mm512_cvtne2ps_pbh
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh kt_mm512_cvtneps_pbh
#undef _mm512_cvtpbh_ps
#define _mm512_cvtpbh_ps kt_mm512_cvtpbh_ps
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps kt_mm512_dpbf16_ps
#undef _mm512_mask_dpbf16_ps
#define _mm512_mask_dpbf16_ps kt_mask_dpbf16_ps_is_broken_in_gcc_12
#undef _mm512_maskz_dpbf16_ps
#define _mm512_maskz_dpbf16_ps kt_maskz_dpbf16_ps_is_broken_in_gcc_12
