// Shared by the case files. A CASE is compiled twice, with the emulated intrinsics (-DKT_EMULATE)
// and with the real ones. A SCALAR is the definition of the case with its name.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef KT_EMULATE
#include "emul_amx.h"
#else
#include <immintrin.h>
#endif

struct Input {
  alignas(64) uint8_t a[1024], b[1024], c[1024];
  uint64_t k;           // mask
  const uint8_t* edge;  // 256 readable bytes before it, an unmapped page after it
};
struct Output {
  alignas(64) uint8_t v[1024];
};
enum Feature { kF512, kVNNI, kVBMI, kBF16, kAmxInt8, kAmxBf16, kFeatures };
enum Kind { kBits, kFloats };  // kFloats: any NaN equals any NaN, because payloads may differ
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

// ---- Helpers of the scalar definitions.
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
