// B of the tile kernels from ggml's formats (gemm_amx.inl, unpack_bf16.inl): computed in float32,
// then rounded to bf16. Codes of up to five bits are converted to floats by look-up. A piece is two
// quads of columns.

// The values of codes without scale, by their lowest bits; other bits may be above them.
struct CodeValues {
  alignas(64) float of[32];
};
template <WeightFormat format> constexpr CodeValues code_values() {
  constexpr const FormatTraits& kForm = traits_of(format);
  CodeValues values{};
  for (int i = 0; i < 32; ++i) {
    const int code = i & ((1 << kForm.codes.bits) - 1);
    values.of[i] = float(kIsIq4<format> ? kIq4Values[code] : code - kForm.codes.offset);
  }
  return values;
}
template <WeightFormat format> constexpr CodeValues kCodeValues = code_values<format>();

template <WeightFormat format> struct GgmlUnits : UnpackedUnits<false> {
  static constexpr const FormatTraits& kForm = traits_of(format);
  static constexpr int kBits = kForm.codes.bits, kLow = low_plane_bits(kBits);
  static constexpr int64_t kSubCols = kForm.scales.cols == 16 ? 16 : 32;
  static constexpr int64_t kPieceBytes = kForm.part_bytes() / 4;
  // Beyond five bits, the offset is subtracted after scaling; int8 codes get one.
  static constexpr int kOffset = kBits == 8 ? 128 : kBits > 5 ? kForm.codes.offset : 0;
  static constexpr bool kBias = kForm.scales.minimum || kOffset > 0;
  const uint8_t* tile;
  const int64_t block_bytes;
  LanePairs scale, bias;

  GgmlUnits(const uint8_t* t, const MatrixLayout& layout)
      : tile(t), block_bytes(layout.block_bytes()) {}

  void prepare(int64_t p) {
    const int64_t k = p * kPieceCols, column = k % kForm.block_cols;
    const uint8_t* block = tile + k / kForm.block_cols * block_bytes;
    if (column % kSubCols == 0) set_scales(block, column / kSubCols);
    const uint8_t* part = block + kForm.scale_bytes + column / 32 * kForm.part_bytes();
    prefetch_ahead<kPieceBytes>(part + p % 4 * kPieceBytes);
    switch (p % 4) {
      case 0: return unpack<0>(part, piece(p));
      case 1: return unpack<2>(part, piece(p));
      case 2: return unpack<4>(part, piece(p));
      default: return unpack<6>(part, piece(p));
    }
  }
  void finish(const ActRows&, int64_t, float*) const {}

 private:
  void set_scales(const uint8_t* block, int64_t sub) {
    AffineScale of[2];
    for (int v = 0; v < 2; ++v) {
      of[v] = ggml_scale<format>(block, sub, 16 * v);
      if constexpr (kBits == 8) of[v].bias = f_mul(of[v].scale, f_set(-kOffset));
    }
    scale.set(of[0].scale, of[1].scale);
    if constexpr (kBias) bias.set(of[0].bias, of[1].bias);
  }

  // Two quads: columns 0, 1 of the first, then 2, 3, and so on.
  template <int quad> void unpack(const uint8_t* part, uint8_t* dst) const {
    for (int v = 0; v < 2; ++v) {
      unpack_quad<quad>(part, v, dst);
      unpack_quad<quad + 1>(part, v, dst + 2 * kStepBytes);
    }
  }

  template <int quad> void unpack_quad(const uint8_t* part, int v, uint8_t* dst) const {
    const BytePairs pairs(codes<quad>(part, v * 16));
    for (int s = 0; s < 2; ++s) {
      F w[2];
      for (int h = 0; h < 2; ++h) w[h] = weight(value(pairs.at(h, 16 * s + first_bit(quad))), v, h);
      i_store(dst + s * kStepBytes + v * 64, bf16_words(w[1], w[0]));
    }
  }

  // Lanes with the quad's codes, from first_bit of each byte on, surrounded by other bits.
  static constexpr int first_bit(int quad) { return kBits == kLow ? quad % (8 / kLow) * kLow : 0; }
  template <int quad> static I codes(const uint8_t* part, int lane) {
    constexpr int kQuads = 8 / kLow;
    const I low = i_load(part + quad / kQuads * kStepBytes + lane * 4);
    if constexpr (kBits == 8)
      return i_xor(low, i_set(int32_t(0x80808080)));
    else if constexpr (kBits == kLow)
      return low;
    else
      return select(i_set(int32_t(plane_mask(kLow))), i_srl<quad % kQuads * kLow>(low),
                    plane_quad<kBits - kLow, quad, kLow>(part + kLow * kStepBytes, lane));
  }

  static F value(I code) {
    const float* values = kCodeValues<format>.of;
    if constexpr (kBits <= 4) return _mm512_permutexvar_ps(code, f_load(values));
    if constexpr (kBits == 5)
      return _mm512_permutex2var_ps(f_load(values), code, f_load(values + 16));
    return to_f(i_and(code, i_set((1 << kBits) - 1)));
  }

  F weight(F value, int v, int h) const {
    const F s = f_load(scale.value[2 * v + h]);
    if constexpr (kBias)
      return f_fma(value, s, f_load(bias.value[2 * v + h]));
    else
      return f_mul(value, s);
  }
};
