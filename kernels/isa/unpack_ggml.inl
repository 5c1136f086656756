// B of the tile kernels from ggml's formats (gemm_amx.inl, unpack_bf16.inl): in float32, then
// rounded to bf16. A piece is two quads of columns.

// The codes of quad `quad`, as part_quad; the quad is known at run time only.
template <int bits> inline I plane_quad_at(const uint8_t* plane, int quad, int lane) {
  constexpr int kQuads = 8 / bits;
  const I x = i_load(plane + quad / kQuads * kStepBytes + lane * 4);
  if constexpr (bits == 8) return x;
  const I shift = i_set(quad % kQuads * bits);
  return i_and(_mm512_srlv_epi32(x, shift), i_set(int32_t(plane_mask(bits))));
}
template <int bits> inline I part_quad_at(const uint8_t* part, int quad, int lane) {
  constexpr int kLow = low_plane_bits(bits);
  const I low = plane_quad_at<kLow>(part, quad, lane);
  if constexpr (bits == kLow)
    return low;
  else {
    const uint8_t* high = part + kLow * kStepBytes;
    return i_or(low, i_sll<kLow>(plane_quad_at<bits - kLow>(high, quad, lane)));
  }
}

template <WeightFormat format> struct GgmlUnits : UnpackedUnits<false> {
  static constexpr GgmlFormat kForm = ggml_format(format);
  static constexpr int64_t kSubCols = kForm.sub_cols == 16 ? 16 : 32;
  const uint8_t* tile;
  const int64_t block_bytes;
  LanePairs scale, bias;

  GgmlUnits(const uint8_t* t, const MatrixLayout& layout)
      : tile(t), block_bytes(layout.block_bytes()) {}

  void prepare(int64_t p) {
    const int64_t k = p * kPieceCols, column = k % kForm.block_cols;
    const uint8_t* block = tile + k / kForm.block_cols * block_bytes;
    if (column % kSubCols == 0) {
      const AffineScale first = ggml_scale<format>(block, column / kSubCols, 0),
                        second = ggml_scale<format>(block, column / kSubCols, 16);
      scale.set(first.scale, second.scale);
      if constexpr (kHasBias<format>) bias.set(first.bias, second.bias);
    }
    const uint8_t* part = block + kForm.scale_bytes() + column / 32 * kForm.part_bytes();
    prefetch_ahead<kForm.part_bytes() / 4>(part + column % 32 / 8 * (kForm.part_bytes() / 4));
    const int quad = int(column % 32 / 4);
    for (int v = 0; v < 2; ++v) {
      if constexpr (kForm.bits == 4) {
        unpack_nibbles(part + quad / 2 * kStepBytes, v, piece(p));
      } else {
        for (int q = 0; q < 2; ++q)
          unpack_quad(part_quad_at<kForm.bits>(part, quad + q, v * 16), v,
                      piece(p) + 2 * q * kStepBytes);
      }
    }
  }
  void finish(const ActRows&, int64_t, float*) const {}

 private:
  // A 4-bit step's columns 0, 1, then 2, 3 and so on, by look-up of the codes' values.
  void unpack_nibbles(const uint8_t* step, int v, uint8_t* dst) const {
    const F table = nibble_table(kIsIq4<format> ? kIq4Values : kUnsignedValues);
    const BytePairs pairs(i_load(step + v * 64));
    for (int s = 0; s < 4; ++s) {
      F w[2];
      for (int h = 0; h < 2; ++h)
        w[h] = weight(_mm512_permutexvar_ps(pairs.at(h, kNibbleShifts[s]), table), v, h);
      i_store(dst + s * kStepBytes + v * 64, bf16_words(w[1], w[0]));
    }
  }

  void unpack_quad(I codes, int v, uint8_t* dst) const {
    const BytePairs pairs(codes);
    for (int s = 0; s < 2; ++s) {
      F w[2];
      for (int h = 0; h < 2; ++h) {
        const I x = pairs.at(h, 16 * s);
        const bool is_signed = format == WeightFormat::kQ8_0;
        w[h] = weight(to_f(is_signed ? i_sra<24>(i_sll<24>(x)) : i_and(x, i_set(255))), v, h);
      }
      i_store(dst + s * kStepBytes + v * 64, bf16_words(w[1], w[0]));
    }
  }

  F weight(F q, int v, int h) const {
    const F s = f_load(scale.value[2 * v + h]);
    if constexpr (kHasBias<format>)
      return f_fma(q, s, f_load(bias.value[2 * v + h]));
    else
      return f_mul(q, s);
  }
};
