// B of the tile kernels from group-quantised INT4 (gemm_amx.inl, unpack_bf16.inl): in float32, by
// look-up of the codes' values. A float32 vector covers 8 lanes by two columns, in the order in
// which two of them become one of bf16.
struct LanePairs {
  alignas(64) float value[4][16];
  // Of lanes 0..15 and 16..31.
  void set(F first, F second) {
    for (int i = 0; i < 4; ++i)
      f_store(value[i], _mm512_permutexvar_ps(pair_index(i % 2), i < 2 ? first : second));
  }
  static I pair_index(int half) {
    return i_add(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), i_set(8 * half));
  }
};

template <bool zero>
inline void unpack_codes(const uint8_t* step, F table, const LanePairs& scales,
                         const LanePairs& zeros, uint8_t* dst) {
  // Columns 0, 1 of the step's 8, then 2, 3 and so on (format.h, 4-bit step).
  const I even = _mm512_set_epi32(8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0);
  const I shifts[4] = {even, i_add(even, i_set(16)), i_add(even, i_set(4)), i_add(even, i_set(20))};
  for (int v = 0; v < 2; ++v) {
    const I x = i_load(step + v * 64);
    const I pairs[2] = {_mm512_permutexvar_epi32(LanePairs::pair_index(0), x),
                        _mm512_permutexvar_epi32(LanePairs::pair_index(1), x)};
    for (int s = 0; s < 4; ++s) {
      F w[2];
      for (int h = 0; h < 2; ++h) {
        w[h] = _mm512_permutexvar_ps(_mm512_srlv_epi32(pairs[h], shifts[s]), table);
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
  int64_t left = 0;  // pieces of the present group
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
    const F table = has_zero
                        ? _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
                        : _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    unpack_codes<has_zero>(src, table, scales, zeros, piece(p));
    src += kStepBytes;
    --left;
  }
  void finish(const ActRows&, int64_t, float*) const {}
};
