// Masked loads and stores, streaming, gathers.
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
MASKED_MEMORY(_mm512, ps, float, 16, K16, FC);
MASKED_MEMORY(_mm256, epi8, int8_t, 32, K32, C256);
MASKED_MEMORY(_mm256, epi16, int16_t, 16, K16, C256);
MASKED_MEMORY(_mm, epi8, int8_t, 16, K16, C128);
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
#define INDEX _mm512_and_si512(A, _mm512_set1_epi32(63))
CASE(kF512, kBits, i32gather_epi32, OUT(_mm512_i32gather_epi32(INDEX, in.b, 4)));
SCALAR(i32gather_epi32, LANES(int, int, 16, get<int>(in.b, x & 63)));
CASE(kF512, kBits, i32gather_ps, OUT(_mm512_i32gather_ps(INDEX, in.b, 8)));
SCALAR(i32gather_ps, LANES(int, int, 16, get<int>(in.b, 2 * (x & 63))));
CASE(kF512, kBits, mask_i32gather_epi32, OUT(_mm512_mask_i32gather_epi32(C, K16, INDEX, in.b, 4)));
SCALAR(mask_i32gather_epi32, LANES(int, int, 16, on ? get<int>(in.b, x & 63) : z));
CASE(kF512, kBits, mask_i32gather_ps, OUT(_mm512_mask_i32gather_ps(FC, K16, INDEX, in.b, 4)));
SCALAR(mask_i32gather_ps, LANES(int, int, 16, on ? get<int>(in.b, x & 63) : z));
