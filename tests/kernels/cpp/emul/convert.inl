// Integer widths, float32 to and from int32 and fp16, the first lane.
#define CONVERT(name, operand, RT, AT, n, ...)           \
  CASE(kF512, kBits, name, OUT(_mm512_##name(operand))); \
  SCALAR(name, LANES(RT, AT, n, __VA_ARGS__))
CONVERT(cvtepu8_epi16, A256, int16_t, uint8_t, 32, x);
CONVERT(cvtepi8_epi32, A128, int32_t, int8_t, 16, x);
CONVERT(cvtepu8_epi32, A128, int32_t, uint8_t, 16, x);
CONVERT(cvtepi16_epi32, A256, int32_t, int16_t, 16, x);
CONVERT(cvtepu16_epi32, A256, int32_t, uint16_t, 16, x);
CONVERT(cvtepi32_epi8, A, uint8_t, uint32_t, 16, x);
CONVERT(cvtepi32_epi16, A, uint16_t, uint32_t, 16, x);
CONVERT(cvtepi32_ps, A, float, int32_t, 16, x);
[[maybe_unused]] static int32_t to_int(double rounded) {  // out of range: the integer indefinite
  return rounded >= -2147483648.0 && rounded < 2147483648.0 ? static_cast<int32_t>(rounded)
                                                            : INT32_MIN;
}
CONVERT(cvtps_epi32, FA, int32_t, float, 16, to_int(nearbyint(x)));
CONVERT(cvttps_epi32, FA, int32_t, float, 16, to_int(trunc(x)));
#define NO_EXC 8  // _MM_FROUND_NO_EXC
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
CASE(kF512, kBits, cvtps_ph_truncate, OUT(_mm512_cvtps_ph(FA, 3 | NO_EXC)));
SCALAR(cvtps_ph_truncate, LANES(uint16_t, float, 16, to_half(x, true)));
CASE(kF512, kBits, mask_cvtepi32_storeu_epi8, _mm512_mask_cvtepi32_storeu_epi8(out.v, K16, A));
SCALAR(mask_cvtepi32_storeu_epi8,
       for (int i = 0; i < 16; ++i) if (in.k >> i & 1) out.v[i] = in.a[4 * i]);
CASE(kF512, kBits, mask_cvtepi32_storeu_epi16, _mm512_mask_cvtepi32_storeu_epi16(out.v, K16, A));
SCALAR(mask_cvtepi32_storeu_epi16, for (int i = 0; i < 16; ++i) if (in.k >> i & 1)
                                       set<uint16_t>(out, i, get<uint16_t>(in.a, 2 * i)));
CASE(kF512, kFloats, cvtss_f32, OUT(_mm512_cvtss_f32(FA)));
SCALAR(cvtss_f32, memcpy(out.v, in.a, 4));
CASE(kF512, kBits, cvtsi512_si32, OUT(_mm512_cvtsi512_si32(A)));
SCALAR(cvtsi512_si32, memcpy(out.v, in.a, 4));
