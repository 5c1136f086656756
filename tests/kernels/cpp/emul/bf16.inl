// bf16 conversions and dot product; its helpers also define the AMX product.
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
