// Packed weights of ggml's formats as float32 (unpack_float.inl).

// The four bytes of each lane as floats, signed or unsigned.
template <bool is_signed> inline void byte_values(I quad, F (&x)[4]) {
  if constexpr (is_signed) {
    x[0] = to_f(i_sra<24>(i_sll<24>(quad)));
    x[1] = to_f(i_sra<24>(i_sll<16>(quad)));
    x[2] = to_f(i_sra<24>(i_sll<8>(quad)));
    x[3] = to_f(i_sra<24>(quad));
  } else {
    const I byte = i_set(255);
    x[0] = to_f(i_and(quad, byte));
    x[1] = to_f(i_and(i_srl<8>(quad), byte));
    x[2] = to_f(i_and(i_srl<16>(quad), byte));
    x[3] = to_f(i_srl<24>(quad));
  }
}

template <WeightFormat format> struct GgmlColumns {
  static constexpr const FormatTraits& kForm = traits_of(format);
  // Sub-blocks in 32 columns, and quads in one sub-block.
  static constexpr int kSubs = kForm.scales.cols == 16 ? 2 : 1, kQuads = 8 / kSubs;

  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    const int64_t block_bytes = layout.block_bytes();
    for (int64_t end = k + columns; k < end; k += 32, w += 32 * kTileRows) {
      const uint8_t* block = tile + k / kForm.block_cols * block_bytes;
      const int64_t part = k % kForm.block_cols / 32;
      const uint8_t* steps = block + kForm.scale_bytes + part * kForm.part_bytes();
      for (int v = 0; v < kTileVectors; ++v) {
        AffineScale scales[kSubs];
        for (int s = 0; s < kSubs; ++s)
          scales[s] = ggml_scale<format>(block, part * kSubs + s, v * kLanes);
        quads<0>(steps, v, scales, w);
      }
    }
  }

 private:
  template <int quad>
  static inline void quads(const uint8_t* steps, int v, const AffineScale (&scales)[kSubs],
                           float* w) {
    if constexpr (kForm.codes.bits == 4) {  // 4-bit steps by table, two quads at a time
      const NibbleTable table = nibble_table(kIsIq4<format> ? kIq4Values : kUnsignedValues);
      F x[8];
      nibble_values(i_load(steps + quad / 2 * kStepBytes + v * kLanes * 4), table, x);
      for (int i = 0; i < 8; ++i)
        store_column(w, 4 * quad + i, v, ggml_value<format>(x[i], scales[quad / kQuads]));
      if constexpr (quad + 2 < 8) quads<quad + 2>(steps, v, scales, w);
    } else {
      F x[4];
      byte_values<kForm.codes.type == CodeType::kSigned>(
          part_quad<kForm.codes.bits, quad>(steps, v * kLanes), x);
      for (int i = 0; i < 4; ++i)
        store_column(w, 4 * quad + i, v, ggml_value<format>(x[i], scales[quad / kQuads]));
      if constexpr (quad + 1 < 8) quads<quad + 1>(steps, v, scales, w);
    }
  }
};
