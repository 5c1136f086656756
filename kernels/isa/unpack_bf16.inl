// B of the tile kernels with bf16 products (gemm_amx.inl): weights with their scales, rounded once
// to bf16, to nearest even. The tile unit treats subnormals as zeros, so weights below 2^-126 count
// as zeros. A piece is 8 columns: 4 steps of bf16, 2 of 8-bit codes, 1 of 4-bit codes.
constexpr int64_t kPieceCols = 8;

struct Bf16Units : PackedUnits<false> {
  Bf16Units(const uint8_t* tile, const MatrixLayout&) : PackedUnits{tile} {}
  void finish(const ActRows&, int64_t, float*) const {}
};

inline I bf16_words(F high, F low) { return (I)_mm512_cvtne2ps_pbh(high, low); }
// a where the bits of mask are set, otherwise b. The instruction overwrites b, not the mask.
inline I select(I mask, I a, I b) { return _mm512_ternarylogic_epi32(b, a, mask, 0xd8); }
// Copies each lane's low 16 bits to both of its halves.
inline I both_halves(I x) { return _mm512_or_si512(x, i_sll<16>(x)); }

// If weights are computed in float32, a vector covers 8 lanes by two columns, in the order in which
// two such vectors become one of bf16.
struct LanePairs {
  alignas(64) float value[4][16];
  // The values of lanes 0..15 and 16..31.
  void set(F first, F second) {
    for (int i = 0; i < 4; ++i)
      f_store(value[i], _mm512_permutexvar_ps(pair_index(i % 2), i < 2 ? first : second));
  }
  static I pair_index(int half) {
    return i_add(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), i_set(8 * half));
  }
};

// Bytes 0 and 1, or 2 and 3, of 16 lanes, alternating at the bottom of the lanes of two vectors.
struct BytePairs {
  I lanes[2];
  explicit BytePairs(I x)
      : lanes{_mm512_permutexvar_epi32(LanePairs::pair_index(0), x),
              _mm512_permutexvar_epi32(LanePairs::pair_index(1), x)} {}
  // Vector `half`, shifted right by `shift` more bits.
  I at(int half, int shift) const {
    const I even = _mm512_set_epi32(8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0);
    return _mm512_srlv_epi32(lanes[half], i_add(even, i_set(shift)));
  }
};
// The bit positions of columns 0, 1 of a 4-bit step, then of 2, 3 and so on (format.h).
constexpr int kNibbleShifts[4] = {0, 16, 4, 20};

// Powers of two per lane. Adds them as integers to the exponents of both bf16 words of a lane, if
// no exponent leaves its range.
struct ExponentScales {
  alignas(64) int32_t move[2][16];
  alignas(64) float factor[2][16];
  bool in_range;
  void set(const uint8_t* codes) {
    in_range = true;
    for (int v = 0; v < 2; ++v) {
      const I code = i_load_u8(codes + 16 * v);
      // Weights without their scale are in 2^-9 to 1.75 * 2^8 (e4m3; e2m1: less).
      in_range &= _mm512_cmplt_epu32_mask(i_sub(code, i_set(10)), i_set(237)) == 0xffff;
      i_store(move[v],
              _mm512_slli_epi16(_mm512_sub_epi16(both_halves(code), i_set(0x007f007f)), 7));
    }
    if (in_range) return;
    for (int v = 0; v < 2; ++v) f_store(factor[v], load_ue8m0(codes + 16 * v));
  }
  I apply(I words, int v) const {
    if (in_range)
      return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(words, i_set(0x7fff7fff)), words,
                                    i_load(move[v]));
    // Exact except for infinities, and for subnormals, which do not count.
    const F scale = f_load(factor[v]);
    const I upper = i_set(int32_t(0xffff0000));
    const F low = f_mul(as_f(i_sll<16>(words)), scale),
            high = f_mul(as_f(i_and(words, upper)), scale);
    return select(upper, as_i(high), i_srl<16>(as_i(low)));
  }
};

// A vector of 32 words from 16 words.
inline I word_table(int w15, int w14, int w13, int w12, int w11, int w10, int w9, int w8, int w7,
                    int w6, int w5, int w4, int w3, int w2, int w1, int w0) {
  const auto two = [](int high, int low) { return int32_t(uint32_t(high) << 16 | low); };
  const int a = two(w1, w0), b = two(w3, w2), c = two(w5, w4), d = two(w7, w6), e = two(w9, w8),
            f = two(w11, w10), g = two(w13, w12), h = two(w15, w14);
  return _mm512_set_epi32(h, g, f, e, d, c, b, a, h, g, f, e, d, c, b, a);
}
