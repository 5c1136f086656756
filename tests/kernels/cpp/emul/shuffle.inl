// Shuffles by an immediate, and parts of vectors.
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
PART(zextsi256_si512, _mm512_zextsi256_si512(A256), i < 32 ? in.a[i] : 0);
PART(zextsi128_si512, _mm512_zextsi128_si512(A128), i < 16 ? in.a[i] : 0);
CASE(kF512, kBits, extracti32x8_epi32, OUT(_mm512_extracti32x8_epi32(A, 1)));
SCALAR(extracti32x8_epi32, memcpy(out.v, in.a + 32, 32));
CASE(kF512, kBits, extractf32x8_ps, OUT(_mm512_extractf32x8_ps(FA, 0)));
SCALAR(extractf32x8_ps, memcpy(out.v, in.a, 32));
