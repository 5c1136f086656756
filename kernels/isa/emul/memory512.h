// Masked loads and stores, streaming stores, gathers.
#pragma once
#include "base512.h"

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
KT_EMUL_MASKED_MEMORY(__m512, float, 16, __mmask16, mm512, ps);
KT_EMUL_MASKED_MEMORY(__m256i, int8_t, 32, __mmask32, mm256, epi8);
KT_EMUL_MASKED_MEMORY(__m256i, int16_t, 16, __mmask16, mm256, epi16);
KT_EMUL_MASKED_MEMORY(__m128i, int8_t, 16, __mmask16, mm, epi8);

KT_EMUL_FN __m512i kt_mm512_stream_load_si512(const void* p) { return _mm512_load_si512(p); }
KT_EMUL_FN void kt_mm512_stream_si512(void* p, __m512i a) { _mm512_store_si512(p, a); }

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

// The names used by the kernels.
#undef _mm256_mask_loadu_epi16
#define _mm256_mask_loadu_epi16 kt_mm256_mask_loadu_epi16
#undef _mm256_mask_loadu_epi8
#define _mm256_mask_loadu_epi8 kt_mm256_mask_loadu_epi8
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 kt_mm256_mask_storeu_epi16
#undef _mm256_mask_storeu_epi8
#define _mm256_mask_storeu_epi8 kt_mm256_mask_storeu_epi8
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 kt_mm256_maskz_loadu_epi16
#undef _mm256_maskz_loadu_epi8
#define _mm256_maskz_loadu_epi8 kt_mm256_maskz_loadu_epi8
#undef _mm512_i32gather_epi32
#define _mm512_i32gather_epi32 kt_mm512_i32gather_epi32
#undef _mm512_i32gather_ps
#define _mm512_i32gather_ps kt_mm512_i32gather_ps
#undef _mm512_mask_i32gather_epi32
#define _mm512_mask_i32gather_epi32 kt_mm512_mask_i32gather_epi32
#undef _mm512_mask_i32gather_ps
#define _mm512_mask_i32gather_ps kt_mm512_mask_i32gather_ps
#undef _mm512_mask_loadu_epi16
#define _mm512_mask_loadu_epi16 kt_mm512_mask_loadu_epi16
#undef _mm512_mask_loadu_epi32
#define _mm512_mask_loadu_epi32 kt_mm512_mask_loadu_epi32
#undef _mm512_mask_loadu_epi8
#define _mm512_mask_loadu_epi8 kt_mm512_mask_loadu_epi8
#undef _mm512_mask_loadu_ps
#define _mm512_mask_loadu_ps kt_mm512_mask_loadu_ps
#undef _mm512_mask_storeu_epi16
#define _mm512_mask_storeu_epi16 kt_mm512_mask_storeu_epi16
#undef _mm512_mask_storeu_epi32
#define _mm512_mask_storeu_epi32 kt_mm512_mask_storeu_epi32
#undef _mm512_mask_storeu_epi8
#define _mm512_mask_storeu_epi8 kt_mm512_mask_storeu_epi8
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps kt_mm512_mask_storeu_ps
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 kt_mm512_maskz_loadu_epi16
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32 kt_mm512_maskz_loadu_epi32
#undef _mm512_maskz_loadu_epi8
#define _mm512_maskz_loadu_epi8 kt_mm512_maskz_loadu_epi8
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps kt_mm512_maskz_loadu_ps
#undef _mm512_stream_load_si512
#define _mm512_stream_load_si512 kt_mm512_stream_load_si512
#undef _mm512_stream_si512
#define _mm512_stream_si512 kt_mm512_stream_si512
#undef _mm_mask_loadu_epi8
#define _mm_mask_loadu_epi8 kt_mm_mask_loadu_epi8
#undef _mm_mask_storeu_epi8
#define _mm_mask_storeu_epi8 kt_mm_mask_storeu_epi8
#undef _mm_maskz_loadu_epi8
#define _mm_maskz_loadu_epi8 kt_mm_maskz_loadu_epi8
