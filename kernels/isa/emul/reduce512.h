// Reductions over all lanes.
#pragma once
#include "base512.h"

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
KT_EMUL_REDUCE(int, int32_t, add_epi32, __m512i, __m256i, __m128i, _mm256_add_epi32, _mm_add_epi32);

// The names used by the kernels.
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32 kt_mm512_reduce_add_epi32
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps kt_mm512_reduce_add_ps
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps kt_mm512_reduce_max_ps
