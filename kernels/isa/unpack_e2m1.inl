// B of the tile kernels from e2m1 codes (gemm_amx.inl, unpack_bf16.inl), by look-ups of 16-bit
// words, whose lowest bits are the index.
struct CodeWords {
  I words[4];  // of the columns 0 1, 2 3, 4 5, 6 7
};
inline CodeWords code_words(const uint8_t* step) {
  // Swaps bytes 1 and 2 of each lane. The nibbles of its words are then columns 0 1, 4 5, 2 3 and
  // 6 7, from the lowest.
  const I swap =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  const I x = _mm512_shuffle_epi8(i_load(step), swap);
  return {{x, _mm512_srli_epi16(x, 8), _mm512_srli_epi16(x, 4), _mm512_srli_epi16(x, 12)}};
}

struct MxFp4Units : UnpackedUnits<false> {
  const uint8_t* tile;
  ExponentScales scales;
  MxFp4Units(const uint8_t* t, const MatrixLayout&) : tile(t) {}
  void prepare(int64_t p) {  // blocks of 64 columns, scales of 32
    const uint8_t* block = tile + p / 8 * (64 + 8 * kStepBytes);
    if (p % 4 == 0) scales.set(block + p % 8 / 4 * kTileRows);
    const uint8_t* step = block + 64 + p % 8 * kStepBytes;
    uint8_t* dst = piece(p);
    prefetch_ahead<kStepBytes>(step);
    const I values = word_table(0xc0c0, 0xc080, 0xc040, 0xc000, 0xbfc0, 0xbf80, 0xbf00, 0, 0x40c0,
                                0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0);
    for (int v = 0; v < 2; ++v) {
      const CodeWords codes = code_words(step + v * 64);
      for (int s = 0; s < 4; ++s)
        i_store(dst + s * kStepBytes + v * 64,
                scales.apply(_mm512_permutexvar_epi16(codes.words[s], values), v));
    }
  }
  void finish(const ActRows&, int64_t, float*) const {}
};

// NVFP4 without its global scale, which is applied to the sum, is exact in bf16. Magnitudes are 2^e
// or 1.5 * 2^e, so a weight is the scale or 1.5 * the scale, with e added to its exponent.
struct E4m3LaneScales {
  alignas(64) int32_t one[2][16], one_and_half[2][16];  // bf16, in both halves of a lane
  __mmask32 nonzero[2];
  void set(const uint8_t* codes) {
    // e4m3 shifted left by seven bits is fp16 of value * 2^-8 (not negative here).
    const I half = _mm512_slli_epi16(
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes))), 7);
    const F scale[2] = {
        f_mul(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), f_set(kE4m3Unit)),
        f_mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), f_set(kE4m3Unit))};
    for (int v = 0; v < 2; ++v) {
      const I words = upper_halves(scale[v]);
      i_store(one[v], words);
      i_store(one_and_half[v], upper_halves(f_mul(scale[v], f_set(1.5f))));
      nonzero[v] = _mm512_test_epi16_mask(words, words);
    }
  }
  static I upper_halves(F x) {
    return select(i_set(int32_t(0xffff0000)), as_i(x), i_srl<16>(as_i(x)));
  }
};

struct NvFp4Units : UnpackedUnits<false> {
  const uint8_t* tile;
  E4m3LaneScales scales;
  NvFp4Units(const uint8_t* t, const MatrixLayout&) : tile(t) {}
  void prepare(int64_t p) {  // blocks of 32 columns, scales of 16
    const uint8_t* block = tile + 64 + p / 4 * (64 + 4 * kStepBytes);
    if (p % 2 == 0) scales.set(block + p % 4 / 2 * kTileRows);
    const uint8_t* step = block + 64 + p % 4 * kStepBytes;
    uint8_t* dst = piece(p);
    prefetch_ahead<kStepBytes>(step);
    // Per code: e at the place of the exponent, with the sign; whether the magnitude is 1.5 * 2^e.
    const I exponents = word_table(0x8100, 0x8100, 0x8080, 0x8080, 0x8000, 0x8000, 0x7f80, 0, 0x100,
                                   0x100, 0x80, 0x80, 0, 0, 0xff80, 0);
    const I halves =
        word_table(0xffff, 0, 0xffff, 0, 0xffff, 0, 0, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0, 0);
    for (int v = 0; v < 2; ++v) {
      const CodeWords codes = code_words(step + v * 64);
      for (int s = 0; s < 4; ++s) {
        const I code = codes.words[s];
        const I mantissa = select(_mm512_permutexvar_epi16(code, halves),
                                  i_load(scales.one_and_half[v]), i_load(scales.one[v]));
        const __mmask32 nonzero =
            _mm512_mask_test_epi16_mask(scales.nonzero[v], code, i_set(0x00070007));
        i_store(
            dst + s * kStepBytes + v * 64,
            _mm512_maskz_add_epi16(nonzero, mantissa, _mm512_permutexvar_epi16(code, exponents)));
      }
    }
  }
  void finish(const ActRows&, int64_t m, float* out) const {
    const F global = f_set(*reinterpret_cast<const float*>(tile));
    for (int64_t i = 0; i < m * kTileRows; i += kLanes)
      f_store(out + i, f_mul(f_load(out + i), global));
  }
};
