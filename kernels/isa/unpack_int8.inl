// B of the tile kernels with int8 products (gemm_amx.inl).

struct Int8Units : PackedUnits<true> {
  const uint8_t* tile;
  Int8Units(const uint8_t* t, const MatrixLayout& layout)
      : PackedUnits{t + layout.head_bytes()}, tile(t) {}
  void finish(const ActRows& a, int64_t m, float* out) const { dequantise_rows(tile, a, m, out); }
};

struct Int4RowUnits : UnpackedUnits<true> {
  const uint8_t *tile, *steps;
  Int4RowUnits(const uint8_t* t, const MatrixLayout& layout)
      : tile(t), steps(t + layout.head_bytes()) {}
  void prepare(int64_t p) {
    const I mask = i_set(0x0f0f0f0f), eight = i_set(0x08080808);
    const uint8_t* src = steps + p * kPieceBytes / 2;
    uint8_t* dst = piece(p);
    prefetch_ahead<kPieceBytes / 2>(src);
    for (int64_t i = 0; i < kPieceBytes / 2; i += kStepBytes, dst += 2 * kStepBytes)
      for (int64_t n = 0; n < kStepBytes; n += 64) {
        const I both = i_load(src + i + n);
        i_store(dst + n, i_sub8(i_and(both, mask), eight));
        i_store(dst + kStepBytes + n, i_sub8(i_and(i_srl<4>(both), mask), eight));
      }
  }
  void finish(const ActRows& a, int64_t m, float* out) const { dequantise_rows(tile, a, m, out); }
};
