// Shared by the parts of emul512.h: SIMDe, and views of vectors as lanes and as parts.
//
// Each part defines static kt_* functions and ends with #undef and #define lines that give them the
// names used by the kernels, replacing those of GCC (functions, or macros at -O0) and of SIMDe.
#pragma once
#include <stdint.h>
#include <string.h>

// 64-byte vectors are passed only between static functions here, so no call crosses an ABI.
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
