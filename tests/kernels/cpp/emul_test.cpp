// The emulated AVX-512 and AMX intrinsics against the real instructions and against scalar
// definitions. This file is compiled twice and linked (test_emul.py does it):
//   with -DKT_EMULATE -mavx2 -mfma -mf16c -mbmi2: every CASE below through kernels/isa/emul/
//   without: every CASE through the real intrinsics, the scalar definitions, and main().
// A CASE runs on random and extreme inputs. The real side runs only where the CPU has the
// instructions (SKIP lines say what did not run); the scalar side runs everywhere.
//   emul_test [--iterations N]   exit status 1 when any output differs
//   emul_test --fault NAME       does what a processor refuses with #GP or #UD; must abort
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef KT_EMULATE
#include "emul_amx.h"
#else
#include <cpuid.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <random>
#endif

struct Input {
  alignas(64) uint8_t a[1024], b[1024], c[1024];
  uint64_t k;           // mask
  const uint8_t* edge;  // 256 readable bytes before it, an unmapped page behind
};
struct Output {
  alignas(64) uint8_t v[1024];
};
enum Feature { kF512, kVNNI, kVBMI, kBF16, kAmxInt8, kAmxBf16, kFeatures };
enum Kind { kBits, kFloats };  // kFloats: any NaN equals any NaN, as payloads are not promised
using Function = void (*)(const Input&, Output&);
struct Case {
  const char* name;
  Feature feature;
  Kind kind;
  Function run;
};
struct CaseList {
  Case at[1000];
  int count;
};
extern CaseList emulated_cases;

#ifdef KT_EMULATE
CaseList emulated_cases;
#define CASES emulated_cases
#define TARGET(...)
#else
static CaseList real_cases, scalar_cases;
#define CASES real_cases
#define TARGET(...) __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c" __VA_ARGS__)))
#endif
#define TARGET_kF512 TARGET()
#define TARGET_kVNNI TARGET(",avx512vnni")
#define TARGET_kVBMI TARGET(",avx512vbmi")
#define TARGET_kBF16 TARGET(",avx512bf16")
#define TARGET_kAmxInt8 TARGET(",amx-tile,amx-int8")
#define TARGET_kAmxBf16 TARGET(",amx-tile,amx-bf16")

struct Register {
  Register(CaseList& list, const char* name, Feature feature, Kind kind, Function run) {
    list.at[list.count++] = {name, feature, kind, run};
  }
};
#define CASE(feature, kind, name, ...)                                                     \
  TARGET_##feature static void run_##name([[maybe_unused]] const Input& in, Output& out) { \
    __VA_ARGS__;                                                                           \
  }                                                                                        \
  static const Register register_##name(CASES, #name, feature, kind, run_##name)

#ifdef KT_EMULATE
#define SCALAR(name, ...)
#else
#define SCALAR(name, ...)                                                                   \
  static void scalar_##name([[maybe_unused]] const Input& in, Output& out) { __VA_ARGS__; } \
  static const Register register_scalar_##name(scalar_cases, #name, kF512, kBits, scalar_##name)
#endif

#define OUT(...)                           \
  do {                                     \
    const auto result = __VA_ARGS__;       \
    memcpy(out.v, &result, sizeof result); \
  } while (0)
#define A _mm512_loadu_si512(in.a)
#define B _mm512_loadu_si512(in.b)
#define C _mm512_loadu_si512(in.c)
#define FA _mm512_castsi512_ps(A)
#define FB _mm512_castsi512_ps(B)
#define FC _mm512_castsi512_ps(C)
#define A256 _mm256_loadu_si256((const __m256i*)in.a)
#define B256 _mm256_loadu_si256((const __m256i*)in.b)
#define C256 _mm256_loadu_si256((const __m256i*)in.c)
#define A128 _mm_loadu_si128((const __m128i*)in.a)
#define C128 _mm_loadu_si128((const __m128i*)in.c)
#define K16 static_cast<__mmask16>(in.k)
#define K32 static_cast<__mmask32>(in.k)
#define K8 static_cast<__mmask8>(in.k)

// ---- helpers of the scalar definitions
template <class T> static T get(const uint8_t* p, int i) {
  T v;
  memcpy(&v, p + i * static_cast<int>(sizeof(T)), sizeof v);
  return v;
}
template <class T> static void set(Output& out, int i, T v) {
  memcpy(out.v + i * static_cast<int>(sizeof(T)), &v, sizeof v);
}
[[maybe_unused]] static uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
// out[i] = expression of x = a[i], y = b[i], z = c[i] over n lanes
#define LANES(RT, AT, n, ...)                                                                   \
  for (int i = 0; i < (n); ++i) {                                                               \
    [[maybe_unused]] const AT x = get<AT>(in.a, i), y = get<AT>(in.b, i), z = get<AT>(in.c, i); \
    [[maybe_unused]] const bool on = in.k >> i & 1;                                             \
    set<RT>(out, i, static_cast<RT>(__VA_ARGS__));                                              \
  }
#define MASK(MT, AT, n, ...)                                              \
  uint64_t bits = 0;                                                      \
  for (int i = 0; i < (n); ++i) {                                         \
    [[maybe_unused]] const AT x = get<AT>(in.a, i), y = get<AT>(in.b, i); \
    [[maybe_unused]] const bool on = in.k >> i & 1;                       \
    bits |= static_cast<uint64_t>(__VA_ARGS__) << i;                      \
  }                                                                       \
  set<MT>(out, 0, static_cast<MT>(bits));

// ---- plain binary operations: SIMDe's, checked against the real instruction only
#define BINARY(name) CASE(kF512, kBits, name, OUT(_mm512_##name(A, B)))
// clang-format off
BINARY(add_epi8); BINARY(add_epi16); BINARY(add_epi32); BINARY(add_epi64); BINARY(sub_epi8);
BINARY(sub_epi16); BINARY(sub_epi32); BINARY(sub_epi64); BINARY(mullo_epi16); BINARY(mullo_epi32);
BINARY(mulhi_epi16); BINARY(mul_epu32); BINARY(max_epi8); BINARY(max_epi16); BINARY(max_epi32);
BINARY(max_epu8); BINARY(max_epu16); BINARY(max_epu32); BINARY(min_epi8); BINARY(min_epi16);
BINARY(min_epi32); BINARY(min_epu8); BINARY(min_epu16); BINARY(min_epu32); BINARY(and_si512);
BINARY(or_si512); BINARY(xor_si512); BINARY(andnot_si512); BINARY(and_epi32); BINARY(or_epi32);
BINARY(xor_epi32); BINARY(andnot_epi32); BINARY(adds_epi8); BINARY(adds_epi16); BINARY(adds_epu8);
BINARY(subs_epi8); BINARY(subs_epi16); BINARY(subs_epu8); BINARY(maddubs_epi16);
BINARY(packs_epi16); BINARY(packs_epi32); BINARY(packus_epi16); BINARY(packus_epi32);
BINARY(shuffle_epi8); BINARY(unpacklo_epi8); BINARY(unpackhi_epi8); BINARY(unpacklo_epi16);
BINARY(unpackhi_epi16); BINARY(unpacklo_epi32); BINARY(unpackhi_epi32); BINARY(unpacklo_epi64);
BINARY(unpackhi_epi64); BINARY(sllv_epi32); BINARY(srlv_epi32); BINARY(sllv_epi16);
BINARY(srlv_epi16); BINARY(srav_epi16); BINARY(permutexvar_epi16); BINARY(permutexvar_epi32);
BINARY(permutexvar_epi64);
// clang-format on
CASE(kVBMI, kBits, permutexvar_epi8, OUT(_mm512_permutexvar_epi8(A, B)));
CASE(kVBMI, kBits, permutex2var_epi8, OUT(_mm512_permutex2var_epi8(A, B, C)));
CASE(kVBMI, kBits, multishift_epi64_epi8, OUT(_mm512_multishift_epi64_epi8(A, B)));
CASE(kVBMI, kBits, maskz_permutexvar_epi8, OUT(_mm512_maskz_permutexvar_epi8(in.k, A, B)));
CASE(kF512, kBits, permutexvar_ps, OUT(_mm512_permutexvar_ps(A, FB)));
CASE(kF512, kBits, permutex2var_epi16, OUT(_mm512_permutex2var_epi16(A, B, C)));
CASE(kF512, kBits, permutex2var_epi32, OUT(_mm512_permutex2var_epi32(A, B, C)));
CASE(kF512, kBits, permutex2var_epi64, OUT(_mm512_permutex2var_epi64(A, B, C)));
CASE(kF512, kBits, permutex2var_ps, OUT(_mm512_permutex2var_ps(FA, B, FC)));
#define BINARY_PS(name) CASE(kF512, kFloats, name, OUT(_mm512_##name(FA, FB)))
// clang-format off
BINARY_PS(add_ps); BINARY_PS(sub_ps); BINARY_PS(mul_ps); BINARY_PS(div_ps); BINARY_PS(max_ps);
BINARY_PS(min_ps); BINARY_PS(and_ps); BINARY_PS(or_ps); BINARY_PS(xor_ps); BINARY_PS(andnot_ps);
BINARY_PS(unpacklo_ps); BINARY_PS(unpackhi_ps);
// clang-format on
#define TERNARY_PS(name) CASE(kF512, kFloats, name, OUT(_mm512_##name(FA, FB, FC)))
// clang-format off
TERNARY_PS(fmadd_ps); TERNARY_PS(fmsub_ps); TERNARY_PS(fnmadd_ps); TERNARY_PS(fnmsub_ps);
// clang-format on
CASE(kF512, kFloats, mask_fmadd_ps, OUT(_mm512_mask_fmadd_ps(FA, K16, FB, FC)));
CASE(kF512, kFloats, maskz_fmadd_ps, OUT(_mm512_maskz_fmadd_ps(K16, FA, FB, FC)));
CASE(kF512, kFloats, mask3_fmadd_ps, OUT(_mm512_mask3_fmadd_ps(FA, FB, FC, K16)));
SCALAR(mask3_fmadd_ps, LANES(float, float, 16, on ? fmaf(x, y, z) : z));
CASE(kF512, kFloats, sqrt_ps, OUT(_mm512_sqrt_ps(FA)));
CASE(kF512, kFloats, abs_ps, OUT(_mm512_abs_ps(FA)));
SCALAR(abs_ps, LANES(float, float, 16, fabsf(x)));
CASE(kF512, kFloats, mask_add_ps, OUT(_mm512_mask_add_ps(FC, K16, FA, FB)));
CASE(kF512, kFloats, maskz_mul_ps, OUT(_mm512_maskz_mul_ps(K16, FA, FB)));
CASE(kF512, kFloats, mask_max_ps, OUT(_mm512_mask_max_ps(FC, K16, FA, FB)));
CASE(kF512, kFloats, roundscale_ps_nearest, OUT(_mm512_roundscale_ps(FA, 0)));
CASE(kF512, kFloats, roundscale_ps_floor, OUT(_mm512_roundscale_ps(FA, 1)));
CASE(kF512, kFloats, roundscale_ps_truncate, OUT(_mm512_roundscale_ps(FA, 3)));
CASE(kF512, kBits, abs_epi8, OUT(_mm512_abs_epi8(A)));
CASE(kF512, kBits, abs_epi16, OUT(_mm512_abs_epi16(A)));
CASE(kF512, kBits, abs_epi32, OUT(_mm512_abs_epi32(A)));
CASE(kF512, kBits, ternarylogic_epi32, OUT(_mm512_ternarylogic_epi32(A, B, C, 0xca)));
CASE(kF512, kBits, slli_epi16, OUT(_mm512_slli_epi16(A, 5)));
CASE(kF512, kBits, srli_epi16, OUT(_mm512_srli_epi16(A, 4)));
CASE(kF512, kBits, srai_epi16, OUT(_mm512_srai_epi16(A, 8)));
CASE(kF512, kBits, slli_epi32, OUT(_mm512_slli_epi32(A, 16)));
CASE(kF512, kBits, srli_epi32, OUT(_mm512_srli_epi32(A, 7)));
CASE(kF512, kBits, slli_epi64, OUT(_mm512_slli_epi64(A, 33)));
CASE(kF512, kBits, srli_epi64, OUT(_mm512_srli_epi64(A, 9)));
CASE(kF512, kBits, mask_sub_epi8, OUT(_mm512_mask_sub_epi8(C, in.k, A, B)));
CASE(kF512, kBits, mask_add_epi32, OUT(_mm512_mask_add_epi32(C, K16, A, B)));
CASE(kF512, kBits, mask_sub_epi32, OUT(_mm512_mask_sub_epi32(C, K16, A, B)));
CASE(kF512, kBits, mask_blend_epi8, OUT(_mm512_mask_blend_epi8(in.k, A, B)));
CASE(kF512, kBits, mask_blend_epi16, OUT(_mm512_mask_blend_epi16(K32, A, B)));
CASE(kF512, kBits, mask_blend_epi32, OUT(_mm512_mask_blend_epi32(K16, A, B)));
CASE(kF512, kBits, mask_blend_ps, OUT(_mm512_mask_blend_ps(K16, FA, FB)));
CASE(kF512, kBits, mask_mov_epi8, OUT(_mm512_mask_mov_epi8(A, in.k, B)));
CASE(kF512, kBits, mask_mov_ps, OUT(_mm512_mask_mov_ps(FA, K16, FB)));
CASE(kF512, kBits, maskz_mov_epi8, OUT(_mm512_maskz_mov_epi8(in.k, B)));
CASE(kF512, kBits, maskz_mov_epi16, OUT(_mm512_maskz_mov_epi16(K32, B)));
CASE(kF512, kBits, maskz_mov_epi32, OUT(_mm512_maskz_mov_epi32(K16, B)));
CASE(kF512, kBits, maskz_mov_ps, OUT(_mm512_maskz_mov_ps(K16, FB)));
CASE(kF512, kBits, mask_set1_epi8, OUT(_mm512_mask_set1_epi8(A, in.k, 77)));
CASE(kF512, kBits, maskz_set1_epi32, OUT(_mm512_maskz_set1_epi32(K16, -5)));
CASE(kF512, kBits, movepi8_mask, OUT(_mm512_movepi8_mask(A)));
CASE(kF512, kBits, movepi16_mask, OUT(_mm512_movepi16_mask(A)));
CASE(kF512, kBits, movepi32_mask, OUT(_mm512_movepi32_mask(A)));
CASE(kF512, kBits, movm_epi8, OUT(_mm512_movm_epi8(in.k)));
CASE(kF512, kBits, movm_epi32, OUT(_mm512_movm_epi32(K16)));
CASE(kF512, kBits, test_epi8_mask, OUT(_mm512_test_epi8_mask(A, B)));
CASE(kF512, kBits, test_epi32_mask, OUT(_mm512_test_epi32_mask(A, B)));
CASE(kF512, kBits, set1_epi8, OUT(_mm512_set1_epi8(static_cast<char>(in.a[0]))));
CASE(kF512, kBits, set1_epi16, OUT(_mm512_set1_epi16(static_cast<short>(in.a[0] * 259))));
CASE(kF512, kBits, set1_epi32, OUT(_mm512_set1_epi32(in.a[0] * 65537)));
CASE(kF512, kBits, set1_epi64, OUT(_mm512_set1_epi64(in.a[0] * 4294967297)));
CASE(kF512, kBits, set1_ps, OUT(_mm512_set1_ps(in.a[0])));
CASE(kF512, kBits, setr_epi32,
     OUT(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, in.a[0])));
CASE(kF512, kBits, set_epi32,
     OUT(_mm512_set_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, in.a[0])));
CASE(kF512, kBits, cvtepi8_epi16, OUT(_mm512_cvtepi8_epi16(A256)));
CASE(kF512, kBits, cvtepi16_epi8, OUT(_mm512_cvtepi16_epi8(A)));
CASE(kF512, kBits, cvtsepi16_epi8, OUT(_mm512_cvtsepi16_epi8(A)));
CASE(kF512, kBits, cvtsepi32_epi8, OUT(_mm512_cvtsepi32_epi8(A)));
CASE(kF512, kBits, cvtsepi32_epi16, OUT(_mm512_cvtsepi32_epi16(A)));
CASE(kF512, kBits, cvtepi64_epi32, OUT(_mm512_cvtepi64_epi32(A)));
CASE(kF512, kBits, broadcast_i32x4, OUT(_mm512_broadcast_i32x4(A128)));
CASE(kF512, kBits, broadcast_f32x4, OUT(_mm512_broadcast_f32x4(_mm_castsi128_ps(A128))));
CASE(kF512, kBits, broadcast_i64x4, OUT(_mm512_broadcast_i64x4(A256)));
CASE(kF512, kBits, broadcastb_epi8, OUT(_mm512_broadcastb_epi8(A128)));
CASE(kF512, kBits, broadcastw_epi16, OUT(_mm512_broadcastw_epi16(A128)));
CASE(kF512, kBits, broadcastd_epi32, OUT(_mm512_broadcastd_epi32(A128)));
CASE(kF512, kBits, broadcastq_epi64, OUT(_mm512_broadcastq_epi64(A128)));
CASE(kF512, kBits, broadcastss_ps, OUT(_mm512_broadcastss_ps(_mm_castsi128_ps(A128))));
CASE(kF512, kBits, castsi512_si256, OUT(_mm512_castsi512_si256(A)));
CASE(kF512, kBits, castsi512_si128, OUT(_mm512_castsi512_si128(A)));
CASE(kF512, kBits, castps512_ps256, OUT(_mm512_castps512_ps256(FA)));
CASE(kF512, kBits, castsi256_si512, OUT(_mm512_castsi512_si256(_mm512_castsi256_si512(A256))));
CASE(kF512, kBits, extracti64x4_epi64, OUT(_mm512_extracti64x4_epi64(A, 1)));
CASE(kF512, kBits, extracti32x4_epi32, OUT(_mm512_extracti32x4_epi32(A, 2)));
CASE(kF512, kBits, extractf32x4_ps, OUT(_mm512_extractf32x4_ps(FA, 3)));
CASE(kF512, kBits, inserti64x4, OUT(_mm512_inserti64x4(A, B256, 1)));
CASE(kF512, kBits, inserti32x4, OUT(_mm512_inserti32x4(A, C128, 3)));
CASE(kF512, kBits, inserti32x8, OUT(_mm512_inserti32x8(A, B256, 1)));
CASE(kF512, kBits, shuffle_ps, OUT(_mm512_shuffle_ps(FA, FB, 0x1b)));
CASE(kF512, kBits, load_store_si512, _mm512_store_si512(out.v, _mm512_load_si512(in.a)));
CASE(kF512, kBits, load_store_ps, _mm512_store_ps(out.v, _mm512_load_ps(in.a)));
CASE(kF512, kBits, loadu_storeu_epi8, _mm512_storeu_epi8(out.v + 1, _mm512_loadu_epi8(in.a + 3)));
CASE(kF512, kBits, loadu_storeu_epi32,
     _mm512_storeu_epi32(out.v + 1, _mm512_loadu_epi32(in.a + 3)));

// ---- masked memory
#define MASKED_MEMORY(prefix, suffix, T, n, mask, cast)                                           \
  CASE(kF512, kBits, prefix##_mask_loadu_##suffix,                                                \
       OUT(prefix##_mask_loadu_##suffix(cast, mask, in.a + 4)));                                  \
  SCALAR(prefix##_mask_loadu_##suffix,                                                            \
         for (int i = 0; i < n; ++i) set<T>(out, i, get<T>(in.k >> i & 1 ? in.a + 4 : in.c, i))); \
  CASE(kF512, kBits, prefix##_maskz_loadu_##suffix,                                               \
       OUT(prefix##_maskz_loadu_##suffix(mask, in.a + 4)));                                       \
  SCALAR(prefix##_maskz_loadu_##suffix,                                                           \
         for (int i = 0; i < n; ++i) set<T>(out, i, in.k >> i & 1 ? get<T>(in.a + 4, i) : T{}));  \
  CASE(kF512, kBits, prefix##_mask_storeu_##suffix,                                               \
       prefix##_mask_storeu_##suffix(reinterpret_cast<T*>(out.v), mask, cast));                   \
  SCALAR(prefix##_mask_storeu_##suffix,                                                           \
         for (int i = 0; i < n; ++i) if (in.k >> i & 1) set<T>(out, i, get<T>(in.c, i)))
MASKED_MEMORY(_mm512, epi8, int8_t, 64, in.k, C);
MASKED_MEMORY(_mm512, epi16, int16_t, 32, K32, C);
MASKED_MEMORY(_mm512, epi32, int32_t, 16, K16, C);
MASKED_MEMORY(_mm512, epi64, int64_t, 8, K8, C);
MASKED_MEMORY(_mm512, ps, float, 16, K16, FC);
MASKED_MEMORY(_mm256, epi8, int8_t, 32, K32, C256);
MASKED_MEMORY(_mm256, epi16, int16_t, 16, K16, C256);
MASKED_MEMORY(_mm256, epi32, int32_t, 8, K8, C256);
MASKED_MEMORY(_mm256, ps, float, 8, K8, _mm256_castsi256_ps(C256));
MASKED_MEMORY(_mm, epi8, int8_t, 16, K16, C128);
MASKED_MEMORY(_mm, epi16, int16_t, 8, K8, C128);
MASKED_MEMORY(_mm, epi32, int32_t, 4, K8, C128);
MASKED_MEMORY(_mm, ps, float, 4, K8, _mm_castsi128_ps(C128));
// The disabled elements lie on an unmapped page.
CASE(kF512, kBits, edge_epi8, OUT(_mm512_maskz_loadu_epi8(in.k & 0x1ffff, in.edge - 17)));
SCALAR(edge_epi8,
       for (int i = 0; i < 64; ++i) out.v[i] = i < 17 && (in.k >> i & 1) ? in.edge[i - 17] : 0);
CASE(kF512, kBits, edge_epi16, OUT(_mm512_maskz_loadu_epi16(K32 & 0x1ff, in.edge - 18)));
SCALAR(edge_epi16,
       for (int i = 0; i < 64; ++i) out.v[i] = i < 18 && (in.k >> i / 2 & 1) ? in.edge[i - 18] : 0);
CASE(kF512, kBits, edge_ps, OUT(_mm512_maskz_loadu_ps(K16 & 0x7f, in.edge - 28)));
SCALAR(edge_ps,
       for (int i = 0; i < 64; ++i) out.v[i] = i < 28 && (in.k >> i / 4 & 1) ? in.edge[i - 28] : 0);
CASE(kF512, kBits, stream_load_si512,
     OUT(_mm512_stream_load_si512(const_cast<uint8_t*>(in.a) + 64)));
SCALAR(stream_load_si512, memcpy(out.v, in.a + 64, 64));
CASE(kF512, kBits, stream_si512, _mm512_stream_si512(reinterpret_cast<__m512i*>(out.v), A));
SCALAR(stream_si512, memcpy(out.v, in.a, 64));
CASE(kF512, kBits, stream_ps, _mm512_stream_ps(reinterpret_cast<float*>(out.v), FA));
SCALAR(stream_ps, memcpy(out.v, in.a, 64));
#define INDEX _mm512_and_si512(A, _mm512_set1_epi32(63))
CASE(kF512, kBits, i32gather_epi32, OUT(_mm512_i32gather_epi32(INDEX, in.b, 4)));
SCALAR(i32gather_epi32, LANES(int, int, 16, get<int>(in.b, x & 63)));
CASE(kF512, kBits, i32gather_ps, OUT(_mm512_i32gather_ps(INDEX, in.b, 8)));
SCALAR(i32gather_ps, LANES(int, int, 16, get<int>(in.b, 2 * (x & 63))));
CASE(kF512, kBits, mask_i32gather_epi32, OUT(_mm512_mask_i32gather_epi32(C, K16, INDEX, in.b, 4)));
SCALAR(mask_i32gather_epi32, LANES(int, int, 16, on ? get<int>(in.b, x & 63) : z));
CASE(kF512, kBits, mask_i32gather_ps, OUT(_mm512_mask_i32gather_ps(FC, K16, INDEX, in.b, 4)));
SCALAR(mask_i32gather_ps, LANES(int, int, 16, on ? get<int>(in.b, x & 63) : z));

// ---- conversions
#define CONVERT(name, operand, RT, AT, n, ...)           \
  CASE(kF512, kBits, name, OUT(_mm512_##name(operand))); \
  SCALAR(name, LANES(RT, AT, n, __VA_ARGS__))
CONVERT(cvtepu8_epi16, A256, int16_t, uint8_t, 32, x);
CONVERT(cvtepi8_epi32, A128, int32_t, int8_t, 16, x);
CONVERT(cvtepu8_epi32, A128, int32_t, uint8_t, 16, x);
CONVERT(cvtepi16_epi32, A256, int32_t, int16_t, 16, x);
CONVERT(cvtepu16_epi32, A256, int32_t, uint16_t, 16, x);
CONVERT(cvtepi32_epi64, A256, int64_t, int32_t, 8, x);
CONVERT(cvtepi32_epi8, A, uint8_t, uint32_t, 16, x);
CONVERT(cvtepi32_epi16, A, uint16_t, uint32_t, 16, x);
CONVERT(cvtusepi32_epi8, A, uint8_t, uint32_t, 16, x > 255 ? 255 : x);
CONVERT(cvtepi32_ps, A, float, int32_t, 16, x);
CONVERT(cvtepu32_ps, A, float, uint32_t, 16, x);
CASE(kF512, kFloats, cvtpd_ps, OUT(_mm512_cvtpd_ps(_mm512_castsi512_pd(A))));
SCALAR(cvtpd_ps, LANES(float, double, 8, x));
CASE(kF512, kFloats, cvtps_pd, OUT(_mm512_cvtpd_ps(_mm512_cvtps_pd(_mm256_castsi256_ps(A256)))));
SCALAR(cvtps_pd, LANES(float, float, 8, x));
[[maybe_unused]] static int32_t to_int(double rounded) {  // out of range: the integer indefinite
  return rounded >= -2147483648.0 && rounded < 2147483648.0 ? static_cast<int32_t>(rounded)
                                                            : INT32_MIN;
}
CONVERT(cvtps_epi32, FA, int32_t, float, 16, to_int(nearbyint(x)));
CONVERT(cvttps_epi32, FA, int32_t, float, 16, to_int(trunc(x)));
#define NO_EXC 8  // _MM_FROUND_NO_EXC
CASE(kF512, kBits, cvt_roundps_epi32_nearest, OUT(_mm512_cvt_roundps_epi32(FA, 0 | NO_EXC)));
SCALAR(cvt_roundps_epi32_nearest, LANES(int32_t, float, 16, to_int(nearbyint(x))));
CASE(kF512, kBits, cvt_roundps_epi32_floor, OUT(_mm512_cvt_roundps_epi32(FA, 1 | NO_EXC)));
SCALAR(cvt_roundps_epi32_floor, LANES(int32_t, float, 16, to_int(floor(x))));
CASE(kF512, kBits, cvt_roundps_epi32_ceil, OUT(_mm512_cvt_roundps_epi32(FA, 2 | NO_EXC)));
SCALAR(cvt_roundps_epi32_ceil, LANES(int32_t, float, 16, to_int(ceil(x))));
[[maybe_unused]] static float from_half(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const float v = e == 31 ? (m ? NAN : INFINITY)
                          : ldexpf(static_cast<float>(e ? m + 1024 : m), (e ? e : 1) - 25);
  return h >> 15 ? -v : v;
}
[[maybe_unused]] static uint16_t to_half(float f, bool truncated) {
  const uint32_t u = bits_of(f);
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
  if (std::isnan(f)) return static_cast<uint16_t>(sign | 0x7e00 | (u >> 13 & 0x3ff));
  if (std::isinf(f)) return sign | 0x7c00;
  const double a = fabs(static_cast<double>(f));
  int e = 0;
  frexp(a, &e);
  const int ulp = e - 11 < -24 ? -24 : e - 11;
  const double scaled = ldexp(a, -ulp);
  const double r = ldexp(truncated ? trunc(scaled) : nearbyint(scaled), ulp);
  if (r > 65504) return static_cast<uint16_t>(sign | (truncated ? 0x7bff : 0x7c00));
  if (r < ldexp(1, -14)) return static_cast<uint16_t>(sign | static_cast<int>(ldexp(r, 24)));
  frexp(r, &e);
  return static_cast<uint16_t>(sign |
                               ((e + 14) << 10 | (static_cast<int>(ldexp(r, 11 - e)) & 1023)));
}
CASE(kF512, kFloats, cvtph_ps, OUT(_mm512_cvtph_ps(A256)));
SCALAR(cvtph_ps, LANES(float, uint16_t, 16, from_half(x)));
CASE(kF512, kBits, cvtps_ph, OUT(_mm512_cvtps_ph(FA, 0 | NO_EXC)));
SCALAR(cvtps_ph, LANES(uint16_t, float, 16, to_half(x, false)));
CASE(kF512, kBits, cvt_roundps_ph, OUT(_mm512_cvt_roundps_ph(FA, 3 | NO_EXC)));
SCALAR(cvt_roundps_ph, LANES(uint16_t, float, 16, to_half(x, true)));
CASE(kF512, kBits, mask_cvtepi32_storeu_epi8, _mm512_mask_cvtepi32_storeu_epi8(out.v, K16, A));
SCALAR(mask_cvtepi32_storeu_epi8,
       for (int i = 0; i < 16; ++i) if (in.k >> i & 1) out.v[i] = in.a[4 * i]);
CASE(kF512, kBits, mask_cvtepi32_storeu_epi16, _mm512_mask_cvtepi32_storeu_epi16(out.v, K16, A));
SCALAR(mask_cvtepi32_storeu_epi16, for (int i = 0; i < 16; ++i) if (in.k >> i & 1)
                                       set<uint16_t>(out, i, get<uint16_t>(in.a, 2 * i)));
CASE(kF512, kBits, mask_cvtsepi32_storeu_epi8, _mm512_mask_cvtsepi32_storeu_epi8(out.v, K16, A));
SCALAR(
    mask_cvtsepi32_storeu_epi8, for (int i = 0; i < 16; ++i) if (in.k >> i & 1) {
      const int32_t v = get<int32_t>(in.a, i);
      set<int8_t>(out, i, static_cast<int8_t>(v < -128 ? -128 : v > 127 ? 127 : v));
    });
CASE(kF512, kFloats, cvtss_f32, OUT(_mm512_cvtss_f32(FA)));
SCALAR(cvtss_f32, memcpy(out.v, in.a, 4));
CASE(kF512, kBits, cvtsi512_si32, OUT(_mm512_cvtsi512_si32(A)));
SCALAR(cvtsi512_si32, memcpy(out.v, in.a, 4));

// ---- bf16
[[maybe_unused]] static uint16_t to_bf16(float f) {
  const uint32_t u = bits_of(f);
  if (std::isnan(f)) return static_cast<uint16_t>(u >> 16 | 0x40);
  if (fabsf(f) < FLT_MIN) return static_cast<uint16_t>(u >> 16 & 0x8000);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
[[maybe_unused]] static float from_bf16(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
[[maybe_unused]] static float flush(float f) { return fabsf(f) < FLT_MIN ? copysignf(0, f) : f; }
// Tininess is detected after rounding, as if the exponent had no lower end.
[[maybe_unused]] static float fma_flushed(float a, float b, float c) {
  a = flush(a), b = flush(b), c = flush(c);
  const float r = fmaf(a, b, c);
  const double exact = fma(static_cast<double>(a), b, c);
  if (fabsf(r) == FLT_MIN && fabs(exact) < FLT_MIN * (1 - ldexp(1, -25))) return copysignf(0, r);
  return flush(r);
}
[[maybe_unused]] static float dot_bf16(const uint8_t* a, const uint8_t* b, int i, float acc) {
  acc = fma_flushed(from_bf16(get<uint16_t>(a, 2 * i + 1)), from_bf16(get<uint16_t>(b, 2 * i + 1)),
                    acc);
  return fma_flushed(from_bf16(get<uint16_t>(a, 2 * i)), from_bf16(get<uint16_t>(b, 2 * i)), acc);
}
CASE(kBF16, kBits, cvtneps_pbh, OUT(_mm512_cvtneps_pbh(FA)));
SCALAR(cvtneps_pbh, LANES(uint16_t, float, 16, to_bf16(x)));
CASE(kBF16, kBits, mm256_cvtneps_pbh, OUT(_mm256_cvtneps_pbh(_mm256_castsi256_ps(A256))));
SCALAR(mm256_cvtneps_pbh, LANES(uint16_t, float, 8, to_bf16(x)));
CASE(kBF16, kBits, cvtne2ps_pbh, OUT(_mm512_cvtne2ps_pbh(FA, FB)));
SCALAR(cvtne2ps_pbh,
       for (int i = 0; i < 32; ++i)
           set<uint16_t>(out, i, to_bf16(i < 16 ? get<float>(in.b, i) : get<float>(in.a, i - 16))));
CASE(kBF16, kBits, cvtpbh_ps, OUT(_mm512_cvtpbh_ps((__m256bh)A256)));
SCALAR(cvtpbh_ps, LANES(uint32_t, uint16_t, 16, static_cast<uint32_t>(x) << 16));
CASE(kBF16, kFloats, dpbf16_ps, OUT(_mm512_dpbf16_ps(FC, (__m512bh)A, (__m512bh)B)));
SCALAR(dpbf16_ps, LANES(float, float, 16, dot_bf16(in.a, in.b, i, z)));

// ---- integer dot products
[[maybe_unused]] static uint32_t dot_us(const Input& in, int i, uint32_t acc) {
  for (int j = 4 * i; j < 4 * i + 4; ++j)
    acc += static_cast<uint32_t>(static_cast<int>(in.a[j]) * static_cast<int8_t>(in.b[j]));
  return acc;
}
[[maybe_unused]] static uint32_t dot_words(const Input& in, int i, uint32_t acc) {
  for (int j = 2 * i; j < 2 * i + 2; ++j)
    acc += static_cast<uint32_t>(get<int16_t>(in.a, j) * get<int16_t>(in.b, j));
  return acc;
}
CASE(kVNNI, kBits, dpbusd_epi32, OUT(_mm512_dpbusd_epi32(C, A, B)));
SCALAR(dpbusd_epi32, LANES(uint32_t, uint32_t, 16, dot_us(in, i, z)));
CASE(kVNNI, kBits, mm256_dpbusd_epi32, OUT(_mm256_dpbusd_epi32(C256, A256, B256)));
SCALAR(mm256_dpbusd_epi32, LANES(uint32_t, uint32_t, 8, dot_us(in, i, z)));
CASE(kVNNI, kBits, mask_dpbusd_epi32, OUT(_mm512_mask_dpbusd_epi32(C, K16, A, B)));
SCALAR(mask_dpbusd_epi32, LANES(uint32_t, uint32_t, 16, on ? dot_us(in, i, z) : z));
CASE(kVNNI, kBits, maskz_dpbusd_epi32, OUT(_mm512_maskz_dpbusd_epi32(K16, C, A, B)));
SCALAR(maskz_dpbusd_epi32, LANES(uint32_t, uint32_t, 16, on ? dot_us(in, i, z) : 0));
CASE(kVNNI, kBits, dpbusds_epi32, OUT(_mm512_dpbusds_epi32(C, A, B)));
CASE(kVNNI, kBits, dpwssd_epi32, OUT(_mm512_dpwssd_epi32(C, A, B)));
SCALAR(dpwssd_epi32, LANES(uint32_t, uint32_t, 16, dot_words(in, i, z)));
CASE(kF512, kBits, madd_epi16, OUT(_mm512_madd_epi16(A, B)));
SCALAR(madd_epi16, LANES(uint32_t, uint32_t, 16, dot_words(in, i, 0)));

// ---- shifts
CASE(kF512, kBits, srai_epi32, OUT(_mm512_srai_epi32(A, 24)));
SCALAR(srai_epi32, LANES(int32_t, int32_t, 16, x >> 24));
CASE(kF512, kBits, srai_epi32_over, OUT(_mm512_srai_epi32(A, 40)));
SCALAR(srai_epi32_over, LANES(int32_t, int32_t, 16, x >> 31));
CASE(kF512, kBits, srav_epi32, OUT(_mm512_srav_epi32(A, B)));
SCALAR(srav_epi32, LANES(int32_t, int32_t, 16, x >> (static_cast<uint32_t>(y) > 31 ? 31 : y)));
CASE(kF512, kBits, mask_slli_epi32, OUT(_mm512_mask_slli_epi32(C, K16, A, 7)));
SCALAR(mask_slli_epi32, LANES(uint32_t, uint32_t, 16, on ? x << 7 : z));
CASE(kF512, kBits, maskz_slli_epi32, OUT(_mm512_maskz_slli_epi32(K16, A, 33)));
SCALAR(maskz_slli_epi32, LANES(uint32_t, uint32_t, 16, 0));
CASE(kF512, kBits, mask_srli_epi32, OUT(_mm512_mask_srli_epi32(C, K16, A, 7)));
SCALAR(mask_srli_epi32, LANES(uint32_t, uint32_t, 16, on ? x >> 7 : z));
CASE(kF512, kBits, maskz_srli_epi32, OUT(_mm512_maskz_srli_epi32(K16, A, 9)));
SCALAR(maskz_srli_epi32, LANES(uint32_t, uint32_t, 16, on ? x >> 9 : 0));
CASE(kF512, kBits, mask_srai_epi32, OUT(_mm512_mask_srai_epi32(C, K16, A, 7)));
SCALAR(mask_srai_epi32, LANES(int32_t, int32_t, 16, on ? x >> 7 : z));
CASE(kF512, kBits, maskz_srai_epi32, OUT(_mm512_maskz_srai_epi32(K16, A, 7)));
SCALAR(maskz_srai_epi32, LANES(int32_t, int32_t, 16, on ? x >> 7 : 0));
[[maybe_unused]] static uint8_t byte_at(const uint8_t* low, const uint8_t* high, int i, int n) {
  const int at = (i & 15) + n;  // within one 16-byte lane; null: zeros
  const uint8_t* from = at < 16 ? low : at < 32 ? high : nullptr;
  return from ? from[(i & ~15) + (at & 15)] : 0;
}
CASE(kF512, kBits, alignr_epi8, OUT(_mm512_alignr_epi8(A, B, 5)));
SCALAR(alignr_epi8, for (int i = 0; i < 64; ++i) out.v[i] = byte_at(in.b, in.a, i, 5));
CASE(kF512, kBits, alignr_epi8_21, OUT(_mm512_alignr_epi8(A, B, 21)));
SCALAR(alignr_epi8_21, for (int i = 0; i < 64; ++i) out.v[i] = byte_at(in.b, in.a, i, 21));
CASE(kF512, kBits, bsrli_epi128, OUT(_mm512_bsrli_epi128(A, 3)));
SCALAR(bsrli_epi128, for (int i = 0; i < 64; ++i) out.v[i] = byte_at(in.a, nullptr, i, 3));
CASE(kF512, kBits, bslli_epi128, OUT(_mm512_bslli_epi128(A, 3)));
SCALAR(bslli_epi128, for (int i = 0; i < 64; ++i) out.v[i] = byte_at(nullptr, in.a, i, 13));
CASE(kF512, kBits, bslli_epi128_over, OUT(_mm512_bslli_epi128(A, 17)));
SCALAR(bslli_epi128_over, memset(out.v, 0, 64));

// ---- scalef, getexp, fpclass
[[maybe_unused]] static float scale_by_power(float x, float y) {
  const bool quiet = std::isnan(x) && (bits_of(x) & 0x400000);
  if (std::isnan(y) || (std::isnan(x) && !(quiet && std::isinf(y)))) return NAN;
  if (quiet) return y > 0 ? INFINITY : 0;
  if (std::isinf(y)) return y > 0 ? x * INFINITY : std::isinf(x) ? NAN : copysignf(0, x);
  return ldexpf(x, static_cast<int>(fmax(-1000, fmin(1000, floor(y)))));
}
CASE(kF512, kFloats, scalef_ps, OUT(_mm512_scalef_ps(FA, FB)));
SCALAR(scalef_ps, LANES(float, float, 16, scale_by_power(x, y)));
CASE(kF512, kFloats, getexp_ps, OUT(_mm512_getexp_ps(FA)));
SCALAR(getexp_ps, LANES(float, float, 16, std::isnan(x) ? x : logbf(x)));
#define FPCLASS(name, imm, ...)                                   \
  CASE(kF512, kBits, name, OUT(_mm512_fpclass_ps_mask(FA, imm))); \
  SCALAR(name, MASK(uint16_t, float, 16, __VA_ARGS__))
FPCLASS(fpclass_zero, 0x06, x == 0);
FPCLASS(fpclass_infinite, 0x18, std::isinf(x));
FPCLASS(fpclass_denormal, 0x20, x != 0 && fabsf(x) < FLT_MIN);
FPCLASS(fpclass_negative, 0x40, x < 0 && !std::isinf(x));
FPCLASS(fpclass_nan, 0x81, std::isnan(x));
FPCLASS(fpclass_quiet, 0x01, std::isnan(x) && (get<uint32_t>(in.a, i) & 0x400000));

// ---- comparisons
#define COMPARE(suffix, MT, T, n)                                                          \
  COMPARE_ONE(suffix, eq, MT, T, n, x == y);                                               \
  COMPARE_ONE(suffix, neq, MT, T, n, x != y);                                              \
  COMPARE_ONE(suffix, lt, MT, T, n, x < y);                                                \
  COMPARE_ONE(suffix, le, MT, T, n, x <= y);                                               \
  COMPARE_ONE(suffix, ge, MT, T, n, x >= y);                                               \
  COMPARE_ONE(suffix, gt, MT, T, n, x > y);                                                \
  CASE(kF512, kBits, cmp_##suffix##_mask, OUT(_mm512_cmp_##suffix##_mask(A, B, 2)));       \
  SCALAR(cmp_##suffix##_mask, MASK(MT, T, n, x <= y));                                     \
  CASE(kF512, kBits, cmp_false_##suffix##_mask, OUT(_mm512_cmp_##suffix##_mask(A, B, 3))); \
  SCALAR(cmp_false_##suffix##_mask, set<MT>(out, 0, in.k != in.k));                        \
  CASE(kF512, kBits, cmp_true_##suffix##_mask, OUT(_mm512_cmp_##suffix##_mask(A, B, 7)));  \
  SCALAR(cmp_true_##suffix##_mask, set<MT>(out, 0, static_cast<MT>(in.k == in.k ? ~0ull : 0)))
#define COMPARE_ONE(suffix, op, MT, T, n, ...)                                                \
  CASE(kF512, kBits, cmp##op##_##suffix##_mask, OUT(_mm512_cmp##op##_##suffix##_mask(A, B))); \
  SCALAR(cmp##op##_##suffix##_mask, MASK(MT, T, n, __VA_ARGS__))
COMPARE(epi8, uint64_t, int8_t, 64);
COMPARE(epu8, uint64_t, uint8_t, 64);
COMPARE(epi16, uint32_t, int16_t, 32);
COMPARE(epu16, uint32_t, uint16_t, 32);
COMPARE(epi32, uint16_t, int32_t, 16);
COMPARE(epu32, uint16_t, uint32_t, 16);
#define COMPARE_PS(predicate, ...)                                                        \
  CASE(kF512, kBits, cmp_ps_mask##predicate, OUT(_mm512_cmp_ps_mask(FA, FB, predicate))); \
  SCALAR(cmp_ps_mask##predicate, MASK(uint16_t, float, 16, __VA_ARGS__))
#define NANS (std::isnan(x) || std::isnan(y))
// clang-format off
COMPARE_PS(_CMP_EQ_OQ, x == y); COMPARE_PS(_CMP_LT_OS, x < y); COMPARE_PS(_CMP_LE_OS, x <= y);
COMPARE_PS(_CMP_UNORD_Q, NANS); COMPARE_PS(_CMP_NEQ_UQ, !(x == y));
COMPARE_PS(_CMP_NLT_US, !(x < y)); COMPARE_PS(_CMP_NLE_US, !(x <= y));
COMPARE_PS(_CMP_ORD_Q, !NANS); COMPARE_PS(_CMP_EQ_UQ, NANS || x == y);
COMPARE_PS(_CMP_NGE_US, !(x >= y)); COMPARE_PS(_CMP_NGT_US, !(x > y));
COMPARE_PS(_CMP_FALSE_OQ, x != x && y == y && false); COMPARE_PS(_CMP_NEQ_OQ, !NANS && x != y);
COMPARE_PS(_CMP_GE_OS, x >= y); COMPARE_PS(_CMP_GT_OS, x > y);
COMPARE_PS(_CMP_TRUE_UQ, x == x || true); COMPARE_PS(_CMP_LT_OQ, x < y);
COMPARE_PS(_CMP_GT_OQ, x > y); COMPARE_PS(_CMP_EQ_OS, x == y);
// clang-format on
CASE(kF512, kBits, mask_cmp_ps_mask, OUT(_mm512_mask_cmp_ps_mask(K16, FA, FB, _CMP_LT_OQ)));
SCALAR(mask_cmp_ps_mask, MASK(uint16_t, float, 16, (on && x < y)));
#define COMPARE_PS_NAMED(name, ...)                     \
  CASE(kF512, kBits, name, OUT(_mm512_##name(FA, FB))); \
  SCALAR(name, MASK(uint16_t, float, 16, __VA_ARGS__))
COMPARE_PS_NAMED(cmpeq_ps_mask, x == y);
COMPARE_PS_NAMED(cmplt_ps_mask, x < y);
COMPARE_PS_NAMED(cmple_ps_mask, x <= y);
COMPARE_PS_NAMED(cmpneq_ps_mask, !(x == y));
COMPARE_PS_NAMED(cmpunord_ps_mask, NANS);
COMPARE_PS_NAMED(cmpord_ps_mask, !NANS);
CASE(kF512, kBits, testn_epi8_mask, OUT(_mm512_testn_epi8_mask(A, B)));
SCALAR(testn_epi8_mask, MASK(uint64_t, uint8_t, 64, (x & y) == 0));
CASE(kF512, kBits, testn_epi32_mask, OUT(_mm512_testn_epi32_mask(A, B)));
SCALAR(testn_epi32_mask, MASK(uint16_t, uint32_t, 16, (x & y) == 0));

// ---- shuffles and parts
CASE(kF512, kBits, shuffle_epi32, OUT(_mm512_shuffle_epi32(A, (_MM_PERM_ENUM)0x39)));
SCALAR(shuffle_epi32, LANES(int, int, 16, get<int>(in.a, (i & ~3) + (0x39 >> (i & 3) * 2 & 3))));
CASE(kF512, kBits, permute_ps, OUT(_mm512_permute_ps(FA, 0xb1)));
SCALAR(permute_ps, LANES(int, int, 16, get<int>(in.a, (i & ~3) + (0xb1 >> (i & 3) * 2 & 3))));
CASE(kF512, kBits, permutex_epi64, OUT(_mm512_permutex_epi64(A, 0xd8)));
SCALAR(permutex_epi64,
       LANES(int64_t, int64_t, 8, get<int64_t>(in.a, (i & ~3) + (0xd8 >> (i & 3) * 2 & 3))));
[[maybe_unused]] static void shuffle_quarters(const Input& in, Output& out, int imm) {
  for (int i = 0; i < 4; ++i)
    memcpy(out.v + 16 * i, (i < 2 ? in.a : in.b) + 16 * (imm >> 2 * i & 3), 16);
}
CASE(kF512, kBits, shuffle_f32x4, OUT(_mm512_shuffle_f32x4(FA, FB, 0x4e)));
SCALAR(shuffle_f32x4, shuffle_quarters(in, out, 0x4e));
CASE(kF512, kBits, shuffle_i32x4, OUT(_mm512_shuffle_i32x4(A, B, 0xd2)));
SCALAR(shuffle_i32x4, shuffle_quarters(in, out, 0xd2));
CASE(kF512, kBits, shuffle_i64x2, OUT(_mm512_shuffle_i64x2(A, B, 0x88)));
SCALAR(shuffle_i64x2, shuffle_quarters(in, out, 0x88));
#define PART(name, expression, ...)          \
  CASE(kF512, kBits, name, OUT(expression)); \
  SCALAR(name, for (int i = 0; i < 64; ++i) out.v[i] = __VA_ARGS__)
PART(broadcast_i32x8, _mm512_broadcast_i32x8(A256), in.a[i % 32]);
PART(broadcast_i64x2, _mm512_broadcast_i64x2(A128), in.a[i % 16]);
PART(broadcast_i32x2, _mm512_broadcast_i32x2(A128), in.a[i % 8]);
PART(zextsi256_si512, _mm512_zextsi256_si512(A256), i < 32 ? in.a[i] : 0);
PART(zextsi128_si512, _mm512_zextsi128_si512(A128), i < 16 ? in.a[i] : 0);
PART(zextps256_ps512, _mm512_zextps256_ps512(_mm256_castsi256_ps(A256)), i < 32 ? in.a[i] : 0);
CASE(kF512, kBits, extracti32x8_epi32, OUT(_mm512_extracti32x8_epi32(A, 1)));
SCALAR(extracti32x8_epi32, memcpy(out.v, in.a + 32, 32));
CASE(kF512, kBits, extractf32x8_ps, OUT(_mm512_extractf32x8_ps(FA, 0)));
SCALAR(extractf32x8_ps, memcpy(out.v, in.a, 32));
CASE(kF512, kBits, extracti64x2_epi64, OUT(_mm512_extracti64x2_epi64(A, 3)));
SCALAR(extracti64x2_epi64, memcpy(out.v, in.a + 48, 16));

// ---- reductions
template <class T, class F>
[[maybe_unused]] static void reduce(const uint8_t* from, Output& out, F f) {
  T v[16];
  memcpy(v, from, sizeof v);
  for (int n = 8; n; n /= 2)  // which operand comes first matters when one is a NaN
    for (int i = 0; i < n; ++i) v[i] = n >= 4 ? f(v[i + n], v[i]) : f(v[i], v[i + n]);
  set<T>(out, 0, v[0]);
}
#define REDUCE(kind, name, operand, T, ...)                             \
  CASE(kF512, kind, reduce_##name, OUT(_mm512_reduce_##name(operand))); \
  SCALAR(reduce_##name, reduce<T>(in.a, out, [](T x, T y) -> T { return __VA_ARGS__; }))
REDUCE(kFloats, add_ps, FA, float, x + y);
REDUCE(kFloats, max_ps, FA, float, x > y ? x : y);
REDUCE(kFloats, min_ps, FA, float, x < y ? x : y);
REDUCE(kBits, add_epi32, A, uint32_t, x + y);
REDUCE(kBits, max_epi32, A, int32_t, x > y ? x : y);
REDUCE(kBits, min_epi32, A, int32_t, x < y ? x : y);
REDUCE(kBits, max_epu32, A, uint32_t, x > y ? x : y);
REDUCE(kBits, min_epu32, A, uint32_t, x < y ? x : y);
CASE(kF512, kFloats, mask_reduce_add_ps, OUT(_mm512_mask_reduce_add_ps(K16, FA)));
SCALAR(mask_reduce_add_ps, {
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = in.k >> i & 1 ? get<float>(in.a, i) : 0;
  reduce<float>(reinterpret_cast<uint8_t*>(v), out, [](float x, float y) { return x + y; });
});
CASE(kF512, kFloats, mask_reduce_max_ps, OUT(_mm512_mask_reduce_max_ps(K16, FA)));
SCALAR(mask_reduce_max_ps, {
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = in.k >> i & 1 ? get<float>(in.a, i) : -INFINITY;
  reduce<float>(reinterpret_cast<uint8_t*>(v), out, [](float x, float y) { return x > y ? x : y; });
});

// ---- AMX: tile 0 += tile 1 x tile 2, in a full and in a ragged shape
struct Shape {
  int m, n, k;  // rows of dst, dwords per row of dst, dwords per row of a
};
static constexpr Shape kFull{16, 16, 16}, kRagged{5, 9, 7};
struct Config {
  alignas(64) uint8_t bytes[64];
};
static Config config_of(Shape s) {
  Config c{};
  c.bytes[0] = 1;
  const int rows[3] = {s.m, s.m, s.k}, dwords[3] = {s.n, s.k, s.n};
  for (int t = 0; t < 3; ++t) {
    c.bytes[16 + 2 * t] = static_cast<uint8_t>(4 * dwords[t]);
    c.bytes[48 + t] = static_cast<uint8_t>(rows[t]);
  }
  return c;
}
#define TILES(shape, product)             \
  const Config config = config_of(shape); \
  _tile_loadconfig(config.bytes);         \
  _tile_loadd(0, in.c, 64);               \
  _tile_loadd(1, in.a, 64);               \
  _tile_stream_loadd(2, in.b, 64);        \
  product(0, 1, 2);                       \
  _tile_stored(0, out.v, 64);             \
  _tile_release();
template <class TA, class TB>
[[maybe_unused]] static void int8_product(const Input& in, Output& out, Shape s) {
  for (int m = 0; m < s.m; ++m)
    for (int n = 0; n < s.n; ++n) {
      uint32_t acc = get<uint32_t>(in.c, 16 * m + n);
      for (int k = 0; k < s.k; ++k)
        for (int i = 0; i < 4; ++i)
          acc += static_cast<uint32_t>(static_cast<int>(get<TA>(in.a, 64 * m + 4 * k + i)) *
                                       get<TB>(in.b, 64 * k + 4 * n + i));
      set<uint32_t>(out, 16 * m + n, acc);
    }
}
[[maybe_unused]] static float add_flushed(float a, float b) { return fma_flushed(a, 1, b); }
[[maybe_unused]] static void bf16_product(const Input& in, Output& out, Shape s) {
  for (int m = 0; m < s.m; ++m)
    for (int n = 0; n < s.n; ++n) {
      float sum[2] = {0, 0};
      for (int k = 0; k < s.k; ++k)
        for (int i = 0; i < 2; ++i)
          sum[i] = fma_flushed(from_bf16(get<uint16_t>(in.a, 32 * m + 2 * k + i)),
                               from_bf16(get<uint16_t>(in.b, 32 * k + 2 * n + i)), sum[i]);
      const float c = get<float>(in.c, 16 * m + n);
      set<float>(out, 16 * m + n, add_flushed(c, add_flushed(sum[0], sum[1])));
    }
}
#define TILE_INT8(name, TA, TB)                                       \
  CASE(kAmxInt8, kBits, name##_full, TILES(kFull, _tile_##name));     \
  SCALAR(name##_full, int8_product<TA COMMA TB>(in, out, kFull));     \
  CASE(kAmxInt8, kBits, name##_ragged, TILES(kRagged, _tile_##name)); \
  SCALAR(name##_ragged, int8_product<TA COMMA TB>(in, out, kRagged))
#define COMMA ,
TILE_INT8(dpbssd, int8_t, int8_t);
TILE_INT8(dpbsud, int8_t, uint8_t);
TILE_INT8(dpbusd, uint8_t, int8_t);
TILE_INT8(dpbuud, uint8_t, uint8_t);
CASE(kAmxBf16, kFloats, dpbf16ps_full, TILES(kFull, _tile_dpbf16ps));
SCALAR(dpbf16ps_full, bf16_product(in, out, kFull));
CASE(kAmxBf16, kFloats, dpbf16ps_ragged, TILES(kRagged, _tile_dpbf16ps));
SCALAR(dpbf16ps_ragged, bf16_product(in, out, kRagged));
CASE(kAmxInt8, kBits, tile_zero_store, const Config config = config_of(kRagged);
     _tile_loadconfig(config.bytes); _tile_zero(0); _tile_stored(0, out.v, 64); _tile_release());
SCALAR(tile_zero_store, (void)in; for (int m = 0; m < 5; ++m) memset(out.v + 64 * m, 0, 36));

// ---- what the emulated tiles must refuse; returns when they do not
void emulated_fault(const char* name);
#ifdef KT_EMULATE
void emulated_fault(const char* name) {
  static uint8_t memory[1024];
  Config config = config_of(kRagged);
  if (strcmp(name, "unconfigured") == 0) return _tile_zero(0);
  if (strcmp(name, "reserved") == 0) config.bytes[2] = 1;
  if (strcmp(name, "too_large") == 0) config.bytes[48] = 17;
  if (strcmp(name, "mismatch") == 0) --config.bytes[50];  // rows of b
  _tile_loadconfig(config.bytes);
  if (strcmp(name, "unused_tile") == 0) _tile_loadd(3, memory, 64);
  if (strcmp(name, "same_tile") == 0) _tile_dpbssd(0, 1, 1);
  if (strcmp(name, "mismatch") == 0) _tile_dpbssd(0, 1, 2);
}
#else
// ---- inputs, comparison, main
static std::mt19937_64 rng(20240607);

static float normal() {
  static std::normal_distribution<float> d;
  return d(rng);
}
static uint32_t pick(std::initializer_list<uint32_t> from) {
  return from.begin()[rng() % from.size()];
}

constexpr int kPatterns = 8;
static uint32_t dword(int pattern) {
  const auto r = static_cast<uint32_t>(rng());
  switch (pattern) {
    case 0: return r;
    case 1: {  // extreme bytes
      uint32_t u = 0;
      for (int i = 0; i < 4; ++i) u = u << 8 | pick({0x80, 0x7f, 0xff, 0x00, 0x01, 0x81});
      return u;
    }
    case 2: return bits_of(ldexpf(normal(), static_cast<int>(r % 17) - 8));
    case 3:  // special floats
      return pick({0, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00001, 0xff812345, 0x00000001,
                   0x807fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x3f800000, bits_of(normal()),
                   0x4f000000, 0xcf000000, 0x477fe000, 0x477ff000, 0x33000000, 0x38800000});
    case 4:  // pairs of bf16
      return (bits_of(normal()) & 0xffff0000) | bits_of(normal()) >> 16;
    case 5: {  // pairs of bf16 whose products lie near the smallest normal float
      const float f = ldexpf(normal(), -63), g = ldexpf(normal(), -63 - static_cast<int>(r % 3));
      return (bits_of(f) & 0xffff0000) | bits_of(g) >> 16;
    }
    case 6:  // ties of round-to-integer, and past the integer range
      return bits_of(static_cast<float>(static_cast<int>(r % 2001) - 1000) *
                     (r & 1 << 20 ? 0.5f : 3e6f));
    default:  // ties of float32 to bf16 and to fp16
      return (r & 0xbfff0000) | pick({0x7fff, 0x8000, 0x8001, 0, 0x1000, 0x3000});
  }
}
static void fill(uint8_t* p, int pattern) {
  for (int i = 0; i < 256; ++i) {
    uint32_t v = dword(pattern);
    memcpy(p + 4 * i, &v, 4);
  }
}
static void make_input(Input& in, int pattern) {
  fill(in.a, pattern);
  fill(in.b, pattern);
  fill(in.c, pattern);
  if (pattern == 4 || pattern == 5)  // accumulators of the size of the products
    for (int i = 0; i < 256; ++i) {
      const float f = ldexpf(normal(), pattern == 4 ? 0 : -126);
      memcpy(in.c + 4 * i, &f, 4);
    }
  in.k = rng() % 8 == 0 ? 0 : rng() % 8 == 0 ? ~0ull : rng();
}

static bool same(const Output& x, const Output& y, Kind kind, int* at) {
  for (int i = 0; i < 256; ++i) {
    const auto u = get<uint32_t>(x.v, i), v = get<uint32_t>(y.v, i);
    const bool nans = std::isnan(get<float>(x.v, i)) && std::isnan(get<float>(y.v, i));
    if (u != v && !(kind == kFloats && nans)) {
      *at = i;
      return false;
    }
  }
  return true;
}

static const Case* find(const CaseList& list, const char* name) {
  for (int i = 0; i < list.count; ++i)
    if (strcmp(list.at[i].name, name) == 0) return &list.at[i];
  return nullptr;
}

// Runs both sides on the same inputs; returns the number of inputs on which they differ.
static int compare(const Case& one, Function other, const char* what, int iterations,
                   const uint8_t* edge) {
  static Input in;
  static Output x, y;
  in.edge = edge;
  int bad = 0;
  for (int n = 0; n < iterations; ++n) {
    make_input(in, n % kPatterns);
    memset(x.v, 0xaa, sizeof x.v);
    memset(y.v, 0xaa, sizeof y.v);
    one.run(in, x);
    other(in, y);
    int at = 0;
    if (!same(x, y, one.kind, &at) && bad++ == 0)
      printf("FAIL %s: pattern %d, dword %d: emulated %08x, %s %08x (a %08x, b %08x, c %08x)\n",
             one.name, n % kPatterns, at, get<uint32_t>(x.v, at), what, get<uint32_t>(y.v, at),
             get<uint32_t>(in.a, at), get<uint32_t>(in.b, at), get<uint32_t>(in.c, at));
  }
  return bad;
}

static bool amx_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

static bool have(Feature f) {
  __builtin_cpu_init();
  const bool base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  unsigned a = 0, b = 0, c = 0, leaf7 = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &leaf7);
  constexpr unsigned kBf16Bit = 1u << 22, kTileBit = 1u << 24, kInt8Bit = 1u << 25;
  switch (f) {
    case kF512: return base;
    case kVNNI: return base && __builtin_cpu_supports("avx512vnni");
    case kVBMI: return base && __builtin_cpu_supports("avx512vbmi");
    case kBF16: return base && __builtin_cpu_supports("avx512bf16");
    case kAmxInt8: return base && (leaf7 & kTileBit) && (leaf7 & kInt8Bit) && amx_permitted();
    default: return base && (leaf7 & kTileBit) && (leaf7 & kBf16Bit) && amx_permitted();
  }
}

int main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "--fault") == 0) {
    emulated_fault(argv[2]);
    return 0;
  }
  const int iterations = argc == 3 && strcmp(argv[1], "--iterations") == 0 ? atoi(argv[2]) : 240;
  if (argc != 1 && (argc != 3 || iterations <= 0)) {
    fprintf(stderr, "usage: emul_test [--iterations N], N > 0\n");
    return 2;
  }
  const long page = sysconf(_SC_PAGESIZE);
  void* map = mmap(nullptr, static_cast<size_t>(2 * page), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return perror("mmap"), 2;
  uint8_t* edge = static_cast<uint8_t*>(map) + page;
  for (int i = -256; i < 0; ++i) edge[i] = static_cast<uint8_t>(i * 7);
  if (mprotect(edge, static_cast<size_t>(page), PROT_NONE) != 0) return perror("mprotect"), 2;

  static const char* const kNames[kFeatures] = {"AVX-512 F/BW/DQ/VL", "VNNI",    "VBMI", "BF16",
                                                "AMX-INT8",           "AMX-BF16"};
  bool present[kFeatures];
  int real[kFeatures] = {}, skipped[kFeatures] = {}, defined = 0, failed = 0;
  for (int f = 0; f < kFeatures; ++f) present[f] = have(static_cast<Feature>(f));
  for (int i = 0; i < emulated_cases.count; ++i) {
    const Case& c = emulated_cases.at[i];
    if (const Case* scalar = find(scalar_cases, c.name)) {
      ++defined;
      failed += compare(c, scalar->run, "defined", iterations, edge) > 0;
    }
    if (!present[c.feature]) {
      ++skipped[c.feature];
      continue;
    }
    ++real[c.feature];
    failed += compare(c, find(real_cases, c.name)->run, "real", iterations, edge) > 0;
  }
  for (int f = 0; f < kFeatures; ++f) {
    if (present[f])
      printf("%s: %d cases against the real instruction\n", kNames[f], real[f]);
    else
      printf("SKIP %s: not on this CPU, %d cases not compared with the real instruction\n",
             kNames[f], skipped[f]);
  }
  printf("%d cases, %d with a scalar definition, %d comparisons failed\n", emulated_cases.count,
         defined, failed);
  return failed != 0;
}
#endif
