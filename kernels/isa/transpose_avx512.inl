// Transposes in place: swaps lane j of x[i] and lane i of x[j].
inline void transpose(F (&x)[16]) {
  F pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(pairs[i + j]), b = _mm512_castps_pd(pairs[i + j + 2]);
      quads[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      quads[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  // Quarter q of quads[4 * g + j] is column 4 * q + j of rows 4 * g to 4 * g + 3.
  for (int j = 0; j < 4; ++j) {
    const F even_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x88);
    const F even_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x88);
    const F odd_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xdd);
    const F odd_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xdd);
    x[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    x[4 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    x[8 + j] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    x[12 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}

// Signed bytes a[i] and b[i] to 16-bit pairs, in the order of i.
inline void byte_pairs(I a, I b, I (&pairs)[4]) {
  const I low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
  // Quarter q of both has the pairs of bytes 16 q on.
  const I even = _mm512_shuffle_i64x2(low, high, 0x88), odd = _mm512_shuffle_i64x2(low, high, 0xdd);
  const auto widen = [](I x, int quarters) {
    const I order = quarters == 0 ? _mm512_setr_epi64(0, 1, 4, 5, 0, 0, 0, 0)
                                  : _mm512_setr_epi64(2, 3, 6, 7, 0, 0, 0, 0);
    return _mm512_cvtepi8_epi16(_mm512_castsi512_si256(_mm512_permutexvar_epi64(order, x)));
  };
  pairs[0] = widen(even, 0);  // quarters 0 of low and high
  pairs[1] = widen(odd, 0);
  pairs[2] = widen(even, 1);
  pairs[3] = widen(odd, 1);
}
