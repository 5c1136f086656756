// Additions to simd_avx2.inl that only the GEMM kernels need.

// The values of 4-bit codes, as float32.
using NibbleTable = __m128i;
inline NibbleTable nibble_table(const int8_t* values) {  // of the 16 codes
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
}
// The 8 columns of a 4-bit step.
inline void nibble_values(I step, NibbleTable table, F (&w)[8]) {
  const I mask = i_set(0x0f0f0f0f);
  const I half[2] = {i_lookup(table, i_and(step, mask)),
                     i_lookup(table, i_and(i_srl<4>(step), mask))};
  for (int h = 0; h < 2; ++h) {
    w[4 * h] = to_f(i_sra<24>(i_sll<24>(half[h])));
    w[4 * h + 1] = to_f(i_sra<24>(i_sll<16>(half[h])));
    w[4 * h + 2] = to_f(i_sra<24>(i_sll<8>(half[h])));
    w[4 * h + 3] = to_f(i_sra<24>(half[h]));
  }
}
