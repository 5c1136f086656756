// B of the tile kernels from group-quantised INT4 (gemm_amx.inl, unpack_bf16.inl): computed in
// float32 from looked-up values.
template <bool zero>
inline void unpack_codes(const uint8_t* step, F table, const LanePairs& scales,
                         const LanePairs& zeros, uint8_t* dst) {
  for (int v = 0; v < 2; ++v) {
    const BytePairs pairs(i_load(step + v * 64));
    for (int s = 0; s < 4; ++s) {
      F w[2];
      for (int h = 0; h < 2; ++h) {
        w[h] = _mm512_permutexvar_ps(pairs.at(h, kNibbleShifts[s]), table);
        if constexpr (zero) w[h] = _mm512_sub_ps(w[h], f_load(zeros.value[2 * v + h]));
        w[h] = f_mul(w[h], f_load(scales.value[2 * v + h]));
      }
      i_store(dst + s * kStepBytes + v * 64, bf16_words(w[1], w[0]));
    }
  }
}

template <bool has_zero> struct Int4GroupUnits : UnpackedUnits<false> {
  const uint8_t* src;
  const int64_t scale_bytes, block_scale_bytes, block_pieces;
  const ScaleType type;
  int64_t left = 0;  // pieces that are left of the present group
  LanePairs scales, zeros;
  Int4GroupUnits(const uint8_t* tile, const MatrixLayout& layout)
      : src(tile),
        scale_bytes(kTileRows * layout.scale_bytes()),
        block_scale_bytes(layout.block_scale_bytes()),
        block_pieces(layout.group / kPieceCols),
        type(layout.scale) {}
  void prepare(int64_t p) {
    if (left == 0) {
      scales.set(load_scales(src, type, 0), load_scales(src, type, 16));
      if constexpr (has_zero)
        zeros.set(to_f(i_load_u8(src + scale_bytes)), to_f(i_load_u8(src + scale_bytes + 16)));
      src += block_scale_bytes;
      left = block_pieces;
    }
    prefetch_ahead<kStepBytes>(src);
    const NibbleTable table = nibble_table(has_zero ? kUnsignedValues : kInt4Values);
    unpack_codes<has_zero>(src, table, scales, zeros, piece(p));
    src += kStepBytes;
    --left;
  }
  void finish(const ActRows&, int64_t, float*) const {}
};
