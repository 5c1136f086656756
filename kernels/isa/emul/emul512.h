// AVX-512 on AVX2, for tests only: lets the kernel sources in isa/*.inl compile and run on a CPU
// without AVX-512, so that every machine tests the same lines.
//
// Use: include this file INSTEAD of <immintrin.h>, with -DKT_EMULATE -mavx2 -mfma -mf16c -mbmi2
// -ffp-contract=off and no -mavx512* flag. Needs SIMDe 0.7.4 or later on the include path
// (Debian: libsimde-dev). SIMDe supplies most of the instruction set; here is what it lacks, or
// does inexactly (dpbf16_ps, scalef_ps) or wrongly (madd_epi16), or slowly (dpbusd_epi32). An
// intrinsic that neither has fails to compile ("target specific option mismatch"); add it here,
// with a case in emul_test.cpp.
//
// Everything is static: no symbol of this file can replace one of a real kernel object.
// Immediates may be run-time values here, so that -O0 works. Rounding follows MXCSR, as in the
// instructions, except where noted:
//
//   dpbf16_ps    Per 32-bit lane: t = fma(a.odd, b.odd, acc); acc = fma(a.even, b.even, t): two
//                roundings, the odd pair first. MXCSR is ignored: nearest-even, denormal inputs
//                (acc too) read as zero, denormal results flushed to zero, no exceptions.
//                The masked forms are refused: GCC 12.2 keeps only 8 of their 16 mask bits (it
//                emits kmovb), so kernels must mask the operands instead.
//   cvtne*_pbh   Nearest-even; denormal inputs give a zero of the same sign; NaN keeps its upper
//                half, made quiet.
//   reduce_*     The order of GCC's and Clang's real sequence: halves, quarters, pairs.
//   stream_*     Ordinary loads and stores; alignment is still required.
//
// Masked loads and stores touch only the enabled elements, as in the instructions, so buffers may
// end at the edge of a page.
#pragma once
#ifndef KT_EMULATE
#error "emul512.h is for the emulated test build: compile with -DKT_EMULATE"
#endif
#ifdef __AVX512F__
#error "emul512.h must not be compiled with AVX-512 flags: SIMDe would use the real instructions"
#endif
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "emul512.h needs -mavx2 -mfma -mf16c"
#endif

#include <stdint.h>
#include <string.h>

// 64-byte vectors are passed only between static functions here: no call crosses an ABI.
#pragma GCC diagnostic ignored "-Wpsabi"

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <immintrin.h>  // after SIMDe, which has already included it: the real AVX2 intrinsics

#define KT_EMUL_FN static inline __attribute__((always_inline))

namespace kt_emul {
namespace {

// A vector seen as N lanes of T.
template <class T, int N> struct Lanes { T v[N]; };

template <class To, class From> inline __attribute__((always_inline)) To bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  memcpy(&r, &x, sizeof r);
  return r;
}

struct Half {  // a 512-bit vector as two 256-bit ones
  __m256i lo, hi;
};
struct HalfPs {
  __m256 lo, hi;
};
struct Quarters {
  __m128i v[4];
};
struct Pair {  // a 256-bit vector as two 128-bit ones
  __m128i v[2];
};
struct PairBh {
  __m256bh lo, hi;
};

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

inline float scale_by_power(float a, float b) {
  // a * 2^floor(b). The double product is exact, so that the conversion is the only rounding.
  // 300 is past every float exponent, the denormals' included.
  const float inf = __builtin_inff();
  if (b != b) return a != a ? a + b : b + b;
  if (a != a) {  // a quiet NaN yields to an infinite b, a signalling one does not
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

inline float exponent(float x) {
  const uint32_t u = bits<uint32_t>(x) & 0x7fffffffu;
  if (u >= 0x7f800000u) return u == 0x7f800000u ? __builtin_inff() : x + x;  // NaN made quiet
  if (u == 0) return -__builtin_inff();
  if (u >> 23) return static_cast<float>(static_cast<int>(u >> 23) - 127);
  return static_cast<float>(31 - __builtin_clz(u) - 149);
}

// Classes of _mm512_fpclass_ps_mask.
inline bool in_class(float x, int wanted) {
  const uint32_t u = bits<uint32_t>(x), m = u & 0x7fffffffu;
  const bool negative = u >> 31, nan = m > 0x7f800000u, quiet = m & 0x00400000u;
  return ((wanted & 0x01) && nan && quiet) || ((wanted & 0x02) && u == 0) ||
         ((wanted & 0x04) && u == 0x80000000u) || ((wanted & 0x08) && u == 0x7f800000u) ||
         ((wanted & 0x10) && u == 0xff800000u) || ((wanted & 0x20) && m && m < 0x00800000u) ||
         ((wanted & 0x40) && negative && m && m < 0x7f800000u) ||
         ((wanted & 0x80) && nan && !quiet);
}

inline __attribute__((always_inline)) __m256i dpbusd(__m256i acc, __m256i a, __m256i b) {
  // Even and odd bytes as 16-bit lanes: vpmaddwd is exact on them, where vpmaddubsw saturates.
  const __m256i low = _mm256_set1_epi16(0x00ff);
  const __m256i even =
      _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}

constexpr unsigned kFlushDenormals = 0x9fc0;  // MXCSR: FTZ, DAZ, nearest-even, exceptions masked

inline __attribute__((always_inline)) __m256i bf16_even(__m256i x) {
  return _mm256_slli_epi32(x, 16);
}
inline __attribute__((always_inline)) __m256i bf16_odd(__m256i x) {
  return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
}

// One asm block, so that the compiler can move no other arithmetic between the MXCSR writes.
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

// r[i] = expr(a[i]) over N lanes.
#define KT_EMUL_UNARY(RV, RT, AV, AT, N, name, expr)            \
  KT_EMUL_FN RV kt_##name(AV x) {                               \
    const auto a = kt_emul::bits<kt_emul::Lanes<AT, N>>(x);     \
    kt_emul::Lanes<RT, N> r;                                    \
    for (int i = 0; i < N; ++i) r.v[i] = static_cast<RT>(expr); \
    return kt_emul::bits<RV>(r);                                \
  }

// ---- masked loads and stores
#define KT_EMUL_MASKED_MEMORY(V, T, N, M, prefix, suffix)                                      \
  KT_EMUL_FN V kt_##prefix##_mask_loadu_##suffix(V src, M k, const void* p) {                  \
    auto r = kt_emul::bits<kt_emul::Lanes<T, N>>(src);                                         \
    for (int i = 0; i < N; ++i)                                                                \
      if (k >> i & 1) memcpy(&r.v[i], static_cast<const char*>(p) + i * sizeof(T), sizeof(T)); \
    return kt_emul::bits<V>(r);                                                                \
  }                                                                                            \
  KT_EMUL_FN V kt_##prefix##_maskz_loadu_##suffix(M k, const void* p) {                        \
    return kt_##prefix##_mask_loadu_##suffix(V{}, k, p);                                       \
  }                                                                                            \
  KT_EMUL_FN void kt_##prefix##_mask_storeu_##suffix(void* p, M k, V x) {                      \
    const auto a = kt_emul::bits<kt_emul::Lanes<T, N>>(x);                                     \
    for (int i = 0; i < N; ++i)                                                                \
      if (k >> i & 1) memcpy(static_cast<char*>(p) + i * sizeof(T), &a.v[i], sizeof(T));       \
  }
KT_EMUL_MASKED_MEMORY(__m512i, int8_t, 64, __mmask64, mm512, epi8);
KT_EMUL_MASKED_MEMORY(__m512i, int16_t, 32, __mmask32, mm512, epi16);
KT_EMUL_MASKED_MEMORY(__m512i, int32_t, 16, __mmask16, mm512, epi32);
KT_EMUL_MASKED_MEMORY(__m512i, int64_t, 8, __mmask8, mm512, epi64);
KT_EMUL_MASKED_MEMORY(__m512, float, 16, __mmask16, mm512, ps);
KT_EMUL_MASKED_MEMORY(__m256i, int8_t, 32, __mmask32, mm256, epi8);
KT_EMUL_MASKED_MEMORY(__m256i, int16_t, 16, __mmask16, mm256, epi16);
KT_EMUL_MASKED_MEMORY(__m256i, int32_t, 8, __mmask8, mm256, epi32);
KT_EMUL_MASKED_MEMORY(__m256, float, 8, __mmask8, mm256, ps);
KT_EMUL_MASKED_MEMORY(__m128i, int8_t, 16, __mmask16, mm, epi8);
KT_EMUL_MASKED_MEMORY(__m128i, int16_t, 8, __mmask8, mm, epi16);
KT_EMUL_MASKED_MEMORY(__m128i, int32_t, 4, __mmask8, mm, epi32);
KT_EMUL_MASKED_MEMORY(__m128, float, 4, __mmask8, mm, ps);

// ---- streaming, gather, undefined
KT_EMUL_FN __m512i kt_mm512_stream_load_si512(const void* p) { return _mm512_load_si512(p); }
KT_EMUL_FN void kt_mm512_stream_si512(void* p, __m512i a) { _mm512_store_si512(p, a); }
KT_EMUL_FN void kt_mm512_stream_ps(void* p, __m512 a) { _mm512_store_ps(p, a); }
KT_EMUL_FN __m512i kt_mm512_undefined_epi32() { return __m512i{}; }
KT_EMUL_FN __m512 kt_mm512_undefined_ps() { return __m512{}; }

#define KT_EMUL_GATHER(V, T, suffix)                                                              \
  KT_EMUL_FN V kt_mm512_mask_i32gather_##suffix(V src, __mmask16 k, __m512i index, const void* p, \
                                                int scale) {                                      \
    auto r = kt_emul::bits<kt_emul::Lanes<T, 16>>(src);                                           \
    const auto at = kt_emul::bits<kt_emul::Lanes<int32_t, 16>>(index);                            \
    for (int i = 0; i < 16; ++i)                                                                  \
      if (k >> i & 1)                                                                             \
        memcpy(&r.v[i], static_cast<const char*>(p) + static_cast<int64_t>(at.v[i]) * scale,      \
               sizeof(T));                                                                        \
    return kt_emul::bits<V>(r);                                                                   \
  }                                                                                               \
  KT_EMUL_FN V kt_mm512_i32gather_##suffix(__m512i index, const void* p, int scale) {             \
    return kt_mm512_mask_i32gather_##suffix(V{}, 0xffff, index, p, scale);                        \
  }
KT_EMUL_GATHER(__m512i, int32_t, epi32);
KT_EMUL_GATHER(__m512, float, ps);

// ---- conversions
KT_EMUL_UNARY(__m512i, int16_t, __m256i, uint8_t, 32, mm512_cvtepu8_epi16, a.v[i]);
KT_EMUL_UNARY(__m512i, int32_t, __m128i, int8_t, 16, mm512_cvtepi8_epi32, a.v[i]);
KT_EMUL_UNARY(__m512i, int32_t, __m128i, uint8_t, 16, mm512_cvtepu8_epi32, a.v[i]);
KT_EMUL_UNARY(__m512i, int32_t, __m256i, int16_t, 16, mm512_cvtepi16_epi32, a.v[i]);
KT_EMUL_UNARY(__m512i, int32_t, __m256i, uint16_t, 16, mm512_cvtepu16_epi32, a.v[i]);
KT_EMUL_UNARY(__m512i, int64_t, __m256i, int32_t, 8, mm512_cvtepi32_epi64, a.v[i]);
KT_EMUL_UNARY(__m128i, uint8_t, __m512i, uint32_t, 16, mm512_cvtepi32_epi8, a.v[i]);
KT_EMUL_UNARY(__m256i, uint16_t, __m512i, uint32_t, 16, mm512_cvtepi32_epi16, a.v[i]);
KT_EMUL_UNARY(__m128i, uint8_t, __m512i, uint32_t, 16, mm512_cvtusepi32_epi8,
              a.v[i] > 255 ? 255 : a.v[i]);
KT_EMUL_UNARY(__m512d, double, __m256, float, 8, mm512_cvtps_pd, a.v[i]);
KT_EMUL_UNARY(__m256, float, __m512d, double, 8, mm512_cvtpd_ps, a.v[i]);
KT_EMUL_UNARY(__m512, float, __m512i, int32_t, 16, mm512_cvtepi32_ps, a.v[i]);
KT_EMUL_UNARY(__m512, float, __m512i, uint32_t, 16, mm512_cvtepu32_ps, a.v[i]);

KT_EMUL_FN __m512i kt_mm512_cvtps_epi32(__m512 x) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  return kt_emul::bits<__m512i>(kt_emul::Half{_mm256_cvtps_epi32(h.lo), _mm256_cvtps_epi32(h.hi)});
}
KT_EMUL_FN __m512i kt_mm512_cvttps_epi32(__m512 x) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  return kt_emul::bits<__m512i>(
      kt_emul::Half{_mm256_cvttps_epi32(h.lo), _mm256_cvttps_epi32(h.hi)});
}
// The four rounding modes as compile-time constants for an AVX2 or F16C intrinsic.
#define KT_EMUL_ROUNDING(mode, use)                                       \
  switch ((mode)&7) {                                                     \
    case _MM_FROUND_TO_NEAREST_INT: use(_MM_FROUND_TO_NEAREST_INT) break; \
    case _MM_FROUND_TO_NEG_INF: use(_MM_FROUND_TO_NEG_INF) break;         \
    case _MM_FROUND_TO_POS_INF: use(_MM_FROUND_TO_POS_INF) break;         \
    case _MM_FROUND_TO_ZERO: use(_MM_FROUND_TO_ZERO) break;               \
    default: use(_MM_FROUND_CUR_DIRECTION) break;                         \
  }
KT_EMUL_FN __m512i kt_mm512_cvt_roundps_epi32(__m512 x, int mode) {
  auto h = kt_emul::bits<kt_emul::HalfPs>(x);
#define KT_EMUL_USE(m) h.lo = _mm256_round_ps(h.lo, m), h.hi = _mm256_round_ps(h.hi, m);
  KT_EMUL_ROUNDING(mode, KT_EMUL_USE)
#undef KT_EMUL_USE
  return kt_mm512_cvtps_epi32(kt_emul::bits<__m512>(h));
}
KT_EMUL_FN __m256i kt_mm512_cvt_roundps_ph(__m512 x, int mode) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  kt_emul::Pair r;
#define KT_EMUL_USE(m) r.v[0] = _mm256_cvtps_ph(h.lo, m), r.v[1] = _mm256_cvtps_ph(h.hi, m);
  KT_EMUL_ROUNDING(mode, KT_EMUL_USE)
#undef KT_EMUL_USE
  return kt_emul::bits<__m256i>(r);
}
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
KT_EMUL_FN void kt_mm512_mask_cvtsepi32_storeu_epi8(void* p, __mmask16 k, __m512i x) {
  kt_mm_mask_storeu_epi8(p, k, _mm512_cvtsepi32_epi8(x));
}
KT_EMUL_FN float kt_mm512_cvtss_f32(__m512 x) { return x[0]; }
KT_EMUL_FN int kt_mm512_cvtsi512_si32(__m512i x) {
  return kt_emul::bits<kt_emul::Lanes<int32_t, 16>>(x).v[0];
}

// ---- bf16
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

// ---- integer dot products
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

// ---- shifts
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
KT_EMUL_FN __m512i kt_mm512_alignr_epi8(__m512i high, __m512i low, int n) {
  const auto h = kt_emul::bits<kt_emul::Lanes<uint8_t, 64>>(high),
             l = kt_emul::bits<kt_emul::Lanes<uint8_t, 64>>(low);
  kt_emul::Lanes<uint8_t, 64> r;
  for (int i = 0; i < 64; ++i) {
    const int base = i & ~15, at = (i & 15) + (n & 0xff);
    r.v[i] = at < 16 ? l.v[base + at] : at < 32 ? h.v[base + at - 16] : 0;
  }
  return kt_emul::bits<__m512i>(r);
}
KT_EMUL_FN __m512i kt_mm512_bsrli_epi128(__m512i x, int n) {
  return kt_mm512_alignr_epi8(__m512i{}, x, n);
}
KT_EMUL_FN __m512i kt_mm512_bslli_epi128(__m512i x, int n) {
  return kt_mm512_alignr_epi8(x, __m512i{}, (n & 0xff) > 16 ? 0 : 16 - (n & 0xff));
}

// ---- fused and scaled arithmetic
KT_EMUL_FN __m512 kt_mm512_mask3_fmadd_ps(__m512 a, __m512 b, __m512 c, __mmask16 k) {
  return _mm512_mask_mov_ps(c, k, _mm512_fmadd_ps(a, b, c));
}
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
KT_EMUL_UNARY(__m512, float, __m512, float, 16, mm512_getexp_ps, kt_emul::exponent(a.v[i]));

// ---- comparisons
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
    switch (predicate & 15) {                      // bit 4 only chooses which NaNs signal
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
KT_EMUL_FN __mmask16 kt_mm512_mask_cmp_ps_mask(__mmask16 k, __m512 x, __m512 y, int predicate) {
  return k & kt_mm512_cmp_ps_mask(x, y, predicate);
}
KT_EMUL_FN __mmask16 kt_mm512_cmple_ps_mask(__m512 x, __m512 y) {
  return kt_mm512_cmp_ps_mask(x, y, _CMP_LE_OS);
}
KT_EMUL_FN __mmask16 kt_mm512_cmpneq_ps_mask(__m512 x, __m512 y) {
  return kt_mm512_cmp_ps_mask(x, y, _CMP_NEQ_UQ);
}
KT_EMUL_FN __mmask16 kt_mm512_cmpunord_ps_mask(__m512 x, __m512 y) {
  return kt_mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q);
}
KT_EMUL_FN __mmask16 kt_mm512_cmpord_ps_mask(__m512 x, __m512 y) {
  return kt_mm512_cmp_ps_mask(x, y, _CMP_ORD_Q);
}
KT_EMUL_FN __mmask16 kt_mm512_fpclass_ps_mask(__m512 x, int wanted) {
  const auto a = kt_emul::bits<kt_emul::Lanes<float, 16>>(x);
  unsigned r = 0;
  for (int i = 0; i < 16; ++i) r |= static_cast<unsigned>(kt_emul::in_class(a.v[i], wanted)) << i;
  return static_cast<__mmask16>(r);
}
KT_EMUL_FN __mmask16 kt_mm512_testn_epi32_mask(__m512i x, __m512i y) {
  return kt_mm512_cmp_epi32_mask(_mm512_and_si512(x, y), __m512i{}, 0);
}
KT_EMUL_FN __mmask64 kt_mm512_testn_epi8_mask(__m512i x, __m512i y) {
  return kt_mm512_cmp_epi8_mask(_mm512_and_si512(x, y), __m512i{}, 0);
}

// ---- shuffles by an immediate
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

// ---- parts of vectors
KT_EMUL_FN __m512i kt_mm512_broadcast_i32x8(__m256i x) {
  return kt_emul::bits<__m512i>(kt_emul::Half{x, x});
}
KT_EMUL_FN __m512i kt_mm512_broadcast_i64x2(__m128i x) { return _mm512_broadcast_i32x4(x); }
KT_EMUL_FN __m512i kt_mm512_broadcast_i32x2(__m128i x) {
  return kt_mm512_broadcast_i64x2(_mm_unpacklo_epi64(x, x));
}
KT_EMUL_FN __m512i kt_mm512_zextsi256_si512(__m256i x) {
  return kt_emul::bits<__m512i>(kt_emul::Half{x, __m256i{}});
}
KT_EMUL_FN __m512i kt_mm512_zextsi128_si512(__m128i x) {
  return kt_emul::bits<__m512i>(kt_emul::Quarters{{x, __m128i{}, __m128i{}, __m128i{}}});
}
KT_EMUL_FN __m512 kt_mm512_zextps256_ps512(__m256 x) {
  return kt_emul::bits<__m512>(kt_emul::HalfPs{x, __m256{}});
}
KT_EMUL_FN __m256i kt_mm512_extracti32x8_epi32(__m512i x, int at) {
  const auto h = kt_emul::bits<kt_emul::Half>(x);
  return at & 1 ? h.hi : h.lo;
}
KT_EMUL_FN __m256 kt_mm512_extractf32x8_ps(__m512 x, int at) {
  const auto h = kt_emul::bits<kt_emul::HalfPs>(x);
  return at & 1 ? h.hi : h.lo;
}
KT_EMUL_FN __m128i kt_mm512_extracti64x2_epi64(__m512i x, int at) {
  return kt_emul::bits<kt_emul::Quarters>(x).v[at & 3];
}

// ---- reductions
#define KT_EMUL_REDUCE(R, RT, name, V, H, Q, op256, op128)                                         \
  KT_EMUL_FN R kt_mm512_reduce_##name(V x) {                                                       \
    struct Halves {                                                                                \
      H lo, hi;                                                                                    \
    };                                                                                             \
    struct HalfOfHalf {                                                                            \
      Q lo, hi;                                                                                    \
    };                                                                                             \
    using Four = kt_emul::Lanes<RT, 4>;                                                            \
    const auto h = kt_emul::bits<Halves>(x);                                                       \
    const auto q = kt_emul::bits<HalfOfHalf>(op256(h.hi, h.lo));                                   \
    const auto four = kt_emul::bits<Four>(op128(q.hi, q.lo));                                      \
    const Four turned{{four.v[2], four.v[3], four.v[0], four.v[1]}};                               \
    const auto two = kt_emul::bits<Four>(op128(kt_emul::bits<Q>(four), kt_emul::bits<Q>(turned))); \
    const Four swapped{{two.v[1], two.v[0], two.v[1], two.v[0]}};                                  \
    return kt_emul::bits<Four>(op128(kt_emul::bits<Q>(two), kt_emul::bits<Q>(swapped))).v[0];      \
  }
KT_EMUL_REDUCE(float, float, add_ps, __m512, __m256, __m128, _mm256_add_ps, _mm_add_ps);
KT_EMUL_REDUCE(float, float, max_ps, __m512, __m256, __m128, _mm256_max_ps, _mm_max_ps);
KT_EMUL_REDUCE(float, float, min_ps, __m512, __m256, __m128, _mm256_min_ps, _mm_min_ps);
KT_EMUL_REDUCE(int, int32_t, add_epi32, __m512i, __m256i, __m128i, _mm256_add_epi32, _mm_add_epi32);
KT_EMUL_REDUCE(int, int32_t, max_epi32, __m512i, __m256i, __m128i, _mm256_max_epi32, _mm_max_epi32);
KT_EMUL_REDUCE(int, int32_t, min_epi32, __m512i, __m256i, __m128i, _mm256_min_epi32, _mm_min_epi32);
KT_EMUL_REDUCE(unsigned, uint32_t, max_epu32, __m512i, __m256i, __m128i, _mm256_max_epu32,
               _mm_max_epu32);
KT_EMUL_REDUCE(unsigned, uint32_t, min_epu32, __m512i, __m256i, __m128i, _mm256_min_epu32,
               _mm_min_epu32);
KT_EMUL_FN float kt_mm512_mask_reduce_add_ps(__mmask16 k, __m512 x) {
  return kt_mm512_reduce_add_ps(_mm512_maskz_mov_ps(k, x));
}
KT_EMUL_FN float kt_mm512_mask_reduce_max_ps(__mmask16 k, __m512 x) {
  return kt_mm512_reduce_max_ps(_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), k, x));
}

// ---- the names the kernels use. GCC's own (functions, or macros at -O0) and SIMDe's give way.
#undef _mm256_cvtneps_pbh
#define _mm256_cvtneps_pbh kt_mm256_cvtneps_pbh
#undef _mm256_dpbusd_epi32
#define _mm256_dpbusd_epi32 kt_mm256_dpbusd_epi32
#undef _mm256_mask_loadu_epi16
#define _mm256_mask_loadu_epi16 kt_mm256_mask_loadu_epi16
#undef _mm256_mask_loadu_epi32
#define _mm256_mask_loadu_epi32 kt_mm256_mask_loadu_epi32
#undef _mm256_mask_loadu_epi8
#define _mm256_mask_loadu_epi8 kt_mm256_mask_loadu_epi8
#undef _mm256_mask_loadu_ps
#define _mm256_mask_loadu_ps kt_mm256_mask_loadu_ps
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 kt_mm256_mask_storeu_epi16
#undef _mm256_mask_storeu_epi32
#define _mm256_mask_storeu_epi32 kt_mm256_mask_storeu_epi32
#undef _mm256_mask_storeu_epi8
#define _mm256_mask_storeu_epi8 kt_mm256_mask_storeu_epi8
#undef _mm256_mask_storeu_ps
#define _mm256_mask_storeu_ps kt_mm256_mask_storeu_ps
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 kt_mm256_maskz_loadu_epi16
#undef _mm256_maskz_loadu_epi32
#define _mm256_maskz_loadu_epi32 kt_mm256_maskz_loadu_epi32
#undef _mm256_maskz_loadu_epi8
#define _mm256_maskz_loadu_epi8 kt_mm256_maskz_loadu_epi8
#undef _mm256_maskz_loadu_ps
#define _mm256_maskz_loadu_ps kt_mm256_maskz_loadu_ps
#undef _mm512_abs_ps
#define _mm512_abs_ps kt_mm512_abs_ps
#undef _mm512_alignr_epi8
#define _mm512_alignr_epi8 kt_mm512_alignr_epi8
#undef _mm512_broadcast_i32x2
#define _mm512_broadcast_i32x2 kt_mm512_broadcast_i32x2
#undef _mm512_broadcast_i32x8
#define _mm512_broadcast_i32x8 kt_mm512_broadcast_i32x8
#undef _mm512_broadcast_i64x2
#define _mm512_broadcast_i64x2 kt_mm512_broadcast_i64x2
#undef _mm512_bslli_epi128
#define _mm512_bslli_epi128 kt_mm512_bslli_epi128
#undef _mm512_bsrli_epi128
#define _mm512_bsrli_epi128 kt_mm512_bsrli_epi128
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
#undef _mm512_cmple_ps_mask
#define _mm512_cmple_ps_mask kt_mm512_cmple_ps_mask
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
#undef _mm512_cmpneq_ps_mask
#define _mm512_cmpneq_ps_mask kt_mm512_cmpneq_ps_mask
#undef _mm512_cmpord_ps_mask
#define _mm512_cmpord_ps_mask kt_mm512_cmpord_ps_mask
#undef _mm512_cmpunord_ps_mask
#define _mm512_cmpunord_ps_mask kt_mm512_cmpunord_ps_mask
#undef _mm512_cvt_roundps_epi32
#define _mm512_cvt_roundps_epi32 kt_mm512_cvt_roundps_epi32
#undef _mm512_cvt_roundps_ph
#define _mm512_cvt_roundps_ph kt_mm512_cvt_roundps_ph
#undef _mm512_cvtepi16_epi32
#define _mm512_cvtepi16_epi32 kt_mm512_cvtepi16_epi32
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 kt_mm512_cvtepi32_epi16
#undef _mm512_cvtepi32_epi64
#define _mm512_cvtepi32_epi64 kt_mm512_cvtepi32_epi64
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 kt_mm512_cvtepi32_epi8
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps kt_mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 kt_mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 kt_mm512_cvtepu16_epi32
#undef _mm512_cvtepu32_ps
#define _mm512_cvtepu32_ps kt_mm512_cvtepu32_ps
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16 kt_mm512_cvtepu8_epi16
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 kt_mm512_cvtepu8_epi32
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh kt_mm512_cvtne2ps_pbh
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh kt_mm512_cvtneps_pbh
#undef _mm512_cvtpbh_ps
#define _mm512_cvtpbh_ps kt_mm512_cvtpbh_ps
#undef _mm512_cvtpd_ps
#define _mm512_cvtpd_ps kt_mm512_cvtpd_ps
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps kt_mm512_cvtph_ps
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 kt_mm512_cvtps_epi32
#undef _mm512_cvtps_pd
#define _mm512_cvtps_pd kt_mm512_cvtps_pd
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph kt_mm512_cvt_roundps_ph
#undef _mm512_cvtsi512_si32
#define _mm512_cvtsi512_si32 kt_mm512_cvtsi512_si32
#undef _mm512_cvtss_f32
#define _mm512_cvtss_f32 kt_mm512_cvtss_f32
#undef _mm512_cvttps_epi32
#define _mm512_cvttps_epi32 kt_mm512_cvttps_epi32
#undef _mm512_cvtusepi32_epi8
#define _mm512_cvtusepi32_epi8 kt_mm512_cvtusepi32_epi8
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps kt_mm512_dpbf16_ps
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 kt_mm512_dpbusd_epi32
#undef _mm512_dpwssd_epi32
#define _mm512_dpwssd_epi32 kt_mm512_dpwssd_epi32
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps kt_mm512_extractf32x8_ps
#undef _mm512_extracti32x8_epi32
#define _mm512_extracti32x8_epi32 kt_mm512_extracti32x8_epi32
#undef _mm512_extracti64x2_epi64
#define _mm512_extracti64x2_epi64 kt_mm512_extracti64x2_epi64
#undef _mm512_fpclass_ps_mask
#define _mm512_fpclass_ps_mask kt_mm512_fpclass_ps_mask
#undef _mm512_getexp_ps
#define _mm512_getexp_ps kt_mm512_getexp_ps
#undef _mm512_i32gather_epi32
#define _mm512_i32gather_epi32 kt_mm512_i32gather_epi32
#undef _mm512_i32gather_ps
#define _mm512_i32gather_ps kt_mm512_i32gather_ps
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 kt_mm512_madd_epi16
#undef _mm512_mask3_fmadd_ps
#define _mm512_mask3_fmadd_ps kt_mm512_mask3_fmadd_ps
#undef _mm512_mask_cmp_ps_mask
#define _mm512_mask_cmp_ps_mask kt_mm512_mask_cmp_ps_mask
#undef _mm512_mask_cvtepi32_storeu_epi16
#define _mm512_mask_cvtepi32_storeu_epi16 kt_mm512_mask_cvtepi32_storeu_epi16
#undef _mm512_mask_cvtepi32_storeu_epi8
#define _mm512_mask_cvtepi32_storeu_epi8 kt_mm512_mask_cvtepi32_storeu_epi8
#undef _mm512_mask_cvtsepi32_storeu_epi8
#define _mm512_mask_cvtsepi32_storeu_epi8 kt_mm512_mask_cvtsepi32_storeu_epi8
#undef _mm512_mask_dpbf16_ps
#define _mm512_mask_dpbf16_ps kt_mask_dpbf16_ps_is_broken_in_gcc_12
#undef _mm512_mask_dpbusd_epi32
#define _mm512_mask_dpbusd_epi32 kt_mm512_mask_dpbusd_epi32
#undef _mm512_mask_i32gather_epi32
#define _mm512_mask_i32gather_epi32 kt_mm512_mask_i32gather_epi32
#undef _mm512_mask_i32gather_ps
#define _mm512_mask_i32gather_ps kt_mm512_mask_i32gather_ps
#undef _mm512_mask_loadu_epi16
#define _mm512_mask_loadu_epi16 kt_mm512_mask_loadu_epi16
#undef _mm512_mask_loadu_epi32
#define _mm512_mask_loadu_epi32 kt_mm512_mask_loadu_epi32
#undef _mm512_mask_loadu_epi64
#define _mm512_mask_loadu_epi64 kt_mm512_mask_loadu_epi64
#undef _mm512_mask_loadu_epi8
#define _mm512_mask_loadu_epi8 kt_mm512_mask_loadu_epi8
#undef _mm512_mask_loadu_ps
#define _mm512_mask_loadu_ps kt_mm512_mask_loadu_ps
#undef _mm512_mask_reduce_add_ps
#define _mm512_mask_reduce_add_ps kt_mm512_mask_reduce_add_ps
#undef _mm512_mask_reduce_max_ps
#define _mm512_mask_reduce_max_ps kt_mm512_mask_reduce_max_ps
#undef _mm512_mask_slli_epi32
#define _mm512_mask_slli_epi32 kt_mm512_mask_slli_epi32
#undef _mm512_mask_srai_epi32
#define _mm512_mask_srai_epi32 kt_mm512_mask_srai_epi32
#undef _mm512_mask_srli_epi32
#define _mm512_mask_srli_epi32 kt_mm512_mask_srli_epi32
#undef _mm512_mask_storeu_epi16
#define _mm512_mask_storeu_epi16 kt_mm512_mask_storeu_epi16
#undef _mm512_mask_storeu_epi32
#define _mm512_mask_storeu_epi32 kt_mm512_mask_storeu_epi32
#undef _mm512_mask_storeu_epi64
#define _mm512_mask_storeu_epi64 kt_mm512_mask_storeu_epi64
#undef _mm512_mask_storeu_epi8
#define _mm512_mask_storeu_epi8 kt_mm512_mask_storeu_epi8
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps kt_mm512_mask_storeu_ps
#undef _mm512_maskz_dpbf16_ps
#define _mm512_maskz_dpbf16_ps kt_maskz_dpbf16_ps_is_broken_in_gcc_12
#undef _mm512_maskz_dpbusd_epi32
#define _mm512_maskz_dpbusd_epi32 kt_mm512_maskz_dpbusd_epi32
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 kt_mm512_maskz_loadu_epi16
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32 kt_mm512_maskz_loadu_epi32
#undef _mm512_maskz_loadu_epi64
#define _mm512_maskz_loadu_epi64 kt_mm512_maskz_loadu_epi64
#undef _mm512_maskz_loadu_epi8
#define _mm512_maskz_loadu_epi8 kt_mm512_maskz_loadu_epi8
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps kt_mm512_maskz_loadu_ps
#undef _mm512_maskz_slli_epi32
#define _mm512_maskz_slli_epi32 kt_mm512_maskz_slli_epi32
#undef _mm512_maskz_srai_epi32
#define _mm512_maskz_srai_epi32 kt_mm512_maskz_srai_epi32
#undef _mm512_maskz_srli_epi32
#define _mm512_maskz_srli_epi32 kt_mm512_maskz_srli_epi32
#undef _mm512_permute_ps
#define _mm512_permute_ps kt_mm512_permute_ps
#undef _mm512_permutex_epi64
#define _mm512_permutex_epi64 kt_mm512_permutex_epi64
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32 kt_mm512_reduce_add_epi32
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps kt_mm512_reduce_add_ps
#undef _mm512_reduce_max_epi32
#define _mm512_reduce_max_epi32 kt_mm512_reduce_max_epi32
#undef _mm512_reduce_max_epu32
#define _mm512_reduce_max_epu32 kt_mm512_reduce_max_epu32
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps kt_mm512_reduce_max_ps
#undef _mm512_reduce_min_epi32
#define _mm512_reduce_min_epi32 kt_mm512_reduce_min_epi32
#undef _mm512_reduce_min_epu32
#define _mm512_reduce_min_epu32 kt_mm512_reduce_min_epu32
#undef _mm512_reduce_min_ps
#define _mm512_reduce_min_ps kt_mm512_reduce_min_ps
#undef _mm512_scalef_ps
#define _mm512_scalef_ps kt_mm512_scalef_ps
#undef _mm512_shuffle_epi32
#define _mm512_shuffle_epi32 kt_mm512_shuffle_epi32
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 kt_mm512_shuffle_f32x4
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 kt_mm512_shuffle_i32x4
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2 kt_mm512_shuffle_i64x2
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 kt_mm512_srai_epi32
#undef _mm512_srav_epi32
#define _mm512_srav_epi32 kt_mm512_srav_epi32
#undef _mm512_stream_load_si512
#define _mm512_stream_load_si512 kt_mm512_stream_load_si512
#undef _mm512_stream_ps
#define _mm512_stream_ps kt_mm512_stream_ps
#undef _mm512_stream_si512
#define _mm512_stream_si512 kt_mm512_stream_si512
#undef _mm512_testn_epi32_mask
#define _mm512_testn_epi32_mask kt_mm512_testn_epi32_mask
#undef _mm512_testn_epi8_mask
#define _mm512_testn_epi8_mask kt_mm512_testn_epi8_mask
#undef _mm512_undefined_epi32
#define _mm512_undefined_epi32 kt_mm512_undefined_epi32
#undef _mm512_undefined_ps
#define _mm512_undefined_ps kt_mm512_undefined_ps
#undef _mm512_zextps256_ps512
#define _mm512_zextps256_ps512 kt_mm512_zextps256_ps512
#undef _mm512_zextsi128_si512
#define _mm512_zextsi128_si512 kt_mm512_zextsi128_si512
#undef _mm512_zextsi256_si512
#define _mm512_zextsi256_si512 kt_mm512_zextsi256_si512
#undef _mm_mask_loadu_epi16
#define _mm_mask_loadu_epi16 kt_mm_mask_loadu_epi16
#undef _mm_mask_loadu_epi32
#define _mm_mask_loadu_epi32 kt_mm_mask_loadu_epi32
#undef _mm_mask_loadu_epi8
#define _mm_mask_loadu_epi8 kt_mm_mask_loadu_epi8
#undef _mm_mask_loadu_ps
#define _mm_mask_loadu_ps kt_mm_mask_loadu_ps
#undef _mm_mask_storeu_epi16
#define _mm_mask_storeu_epi16 kt_mm_mask_storeu_epi16
#undef _mm_mask_storeu_epi32
#define _mm_mask_storeu_epi32 kt_mm_mask_storeu_epi32
#undef _mm_mask_storeu_epi8
#define _mm_mask_storeu_epi8 kt_mm_mask_storeu_epi8
#undef _mm_mask_storeu_ps
#define _mm_mask_storeu_ps kt_mm_mask_storeu_ps
#undef _mm_maskz_loadu_epi16
#define _mm_maskz_loadu_epi16 kt_mm_maskz_loadu_epi16
#undef _mm_maskz_loadu_epi32
#define _mm_maskz_loadu_epi32 kt_mm_maskz_loadu_epi32
#undef _mm_maskz_loadu_epi8
#define _mm_maskz_loadu_epi8 kt_mm_maskz_loadu_epi8
#undef _mm_maskz_loadu_ps
#define _mm_maskz_loadu_ps kt_mm_maskz_loadu_ps
