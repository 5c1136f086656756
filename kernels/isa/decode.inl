// Decodes the codes of weights and scales, for all kernels.

// ---- e4m3. If its bits are moved to the places of fp16's sign, exponent and mantissa, the result
// is value * 2^-8, including subnormals and zeros (fp16's exponent bias is 15, e4m3's is 7).
constexpr float kE4m3Unit = 256.0f;

// The bytes of an 8-bit step are columns k, k+2, k+1, k+3, so its even and its odd bytes are two
// 16-bit steps. These functions return them as fp16 of value * 2^-8.
inline I e4m3_even_fp16(I step) {
  return i_and(i_sra16<1>(i_sll16<8>(step)), i_set(int32_t(0xbf80bf80)));
}
inline I e4m3_odd_fp16(I step) { return i_and(i_sra16<1>(step), i_set(int32_t(0xbf80bf80))); }

// ---- e2m1: 2 * value + 12, in 0..24, for codes in the low halves of bytes. The factor 2 is left
// to the scale. The offset is removed with the sum of the activations.
constexpr int kE2m1Offset = 12;
constexpr float kE2m1Unit = 0.5f;
inline I e2m1_codes(I nibbles) {
  return i_lookup(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0),
                  nibbles);
}

// ---- The values of 4-bit codes. For e2m1 they are doubled, so that they are integers.
constexpr int8_t kInt4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr int8_t kUnsignedValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// ---- The codebook of kIQ4NL and kIQ4XS: value + 128, for codes in the low halves of bytes.
constexpr int kIq4Offset = 128;
struct Iq4Table {
  alignas(16) uint8_t code[16];
};
constexpr Iq4Table kIq4Table = [] {
  Iq4Table table{};
  for (int i = 0; i < 16; ++i) table.code[i] = uint8_t(kIq4Values[i] + kIq4Offset);
  return table;
}();
inline I iq4_codes(I nibbles) {
  return i_lookup(_mm_load_si128(reinterpret_cast<const __m128i*>(kIq4Table.code)), nibbles);
}

// ---- Scales, one per row of the tile.
inline F load_scales(const uint8_t* p, ScaleType type, int lane) {
  switch (type) {
    case ScaleType::kFP16: return f_load_fp16(reinterpret_cast<const uint16_t*>(p) + lane);
    case ScaleType::kBF16:
      return as_f(i_sll<16>(i_load_u16(reinterpret_cast<const uint16_t*>(p) + lane)));
    default: return f_load(reinterpret_cast<const float*>(p) + lane);
  }
}

// 2^(code - 127). Code 0 has no normal float; 2^-127 is a subnormal with only the top mantissa bit.
inline F load_ue8m0(const uint8_t* p) {
  return as_f(i_max(i_sll<23>(i_load_u8(p)), i_set(0x00400000)));
}
