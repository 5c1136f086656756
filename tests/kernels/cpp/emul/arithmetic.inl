// Shifts of 32-bit lanes, absolute value, scaling by powers of two.
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

CASE(kF512, kFloats, abs_ps, OUT(_mm512_abs_ps(FA)));
SCALAR(abs_ps, LANES(float, float, 16, fabsf(x)));
[[maybe_unused]] static float scale_by_power(float x, float y) {
  const bool quiet = std::isnan(x) && (bits_of(x) & 0x400000);
  if (std::isnan(y) || (std::isnan(x) && !(quiet && std::isinf(y)))) return NAN;
  if (quiet) return y > 0 ? INFINITY : 0;
  if (std::isinf(y)) return y > 0 ? x * INFINITY : std::isinf(x) ? NAN : copysignf(0, x);
  return ldexpf(x, static_cast<int>(fmax(-1000, fmin(1000, floor(y)))));
}
CASE(kF512, kFloats, scalef_ps, OUT(_mm512_scalef_ps(FA, FB)));
SCALAR(scalef_ps, LANES(float, float, 16, scale_by_power(x, y)));
