// Transposes in place: swaps lane j of x[i] and lane i of x[j].
inline void transpose(F (&x)[8]) {
  F pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m256d a = _mm256_castps_pd(pairs[i + j]), b = _mm256_castps_pd(pairs[i + j + 2]);
      quads[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      quads[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
  for (int j = 0; j < 4; ++j) {
    x[j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
    x[4 + j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
  }
}

// Signed bytes a[i] and b[i] to 16-bit pairs, in the order of i.
inline void byte_pairs(I a, I b, I (&pairs)[4]) {
  const I low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
  pairs[0] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(low));
  pairs[1] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(high));
  pairs[2] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(low, 1));
  pairs[3] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(high, 1));
}
