// Integer dot products.
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
