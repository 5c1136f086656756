// Additions to simd_avx512.inl that only the GEMM kernels need.

// The values of 4-bit codes, as float32.
using NibbleTable = F;
inline NibbleTable nibble_table(const int8_t* values) {  // of the 16 codes
  return to_f(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))));
}
// The 8 columns of a 4-bit step. The permutation uses only the low 4 bits of a lane.
inline void nibble_values(I step, NibbleTable table, F (&w)[8]) {
  w[0] = _mm512_permutexvar_ps(step, table);
  w[1] = _mm512_permutexvar_ps(i_srl<8>(step), table);
  w[2] = _mm512_permutexvar_ps(i_srl<16>(step), table);
  w[3] = _mm512_permutexvar_ps(i_srl<24>(step), table);
  w[4] = _mm512_permutexvar_ps(i_srl<4>(step), table);
  w[5] = _mm512_permutexvar_ps(i_srl<12>(step), table);
  w[6] = _mm512_permutexvar_ps(i_srl<20>(step), table);
  w[7] = _mm512_permutexvar_ps(i_srl<28>(step), table);
}
