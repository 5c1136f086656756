// BF16 weights on the vector units. A lane holds two consecutive k.
struct Bf16Block {
#ifdef KT_BF16_OPERANDS
  static constexpr ActKind kAct = ActKind::kBF16;
#else
  static constexpr ActKind kAct = ActKind::kFloat;
#endif

  template <int M>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows&,
                         const Rows<M>& rows, float* out) {
    F acc[M][kTileVectors];
    zero_rows(acc);
    const int64_t steps = layout.cols_padded() / 2;
    for (int64_t s = 0; s < steps; ++s, tile += kStepBytes) {
      prefetch_steps(tile, 1);
      add_step(tile, s, rows, acc);
    }
    store_rows(acc, out);
  }

#ifdef KT_BF16_OPERANDS
  // dpbf16ps: two products per lane, A rows of bf16 pairs.
  template <int M>
  static inline void add_step(const uint8_t* w, int64_t s, const Rows<M>& rows,
                              F (&acc)[M][kTileVectors]) {
    for (int r = 0; r < M; ++r) {
      const I x = i_set(load_i32(rows.a[r] + s * 4));
      for (int v = 0; v < kTileVectors; ++v)
        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)i_load(w + v * kLanes * 4), (__m512bh)x);
    }
  }
#else
  // float32 FMA, A rows of floats that hold bf16 values. Shifting and masking converts weights to
  // floats.
  template <int M>
  static inline void add_step(const uint8_t* w, int64_t s, const Rows<M>& rows,
                              F (&acc)[M][kTileVectors]) {
    const I upper = i_set(int32_t(0xffff0000));
    for (int v = 0; v < kTileVectors; ++v) {
      const I step = i_load(w + v * kLanes * 4);
      const F even = as_f(i_sll<16>(step)), odd = as_f(i_and(step, upper));
      for (int r = 0; r < M; ++r) {
        const auto* x = reinterpret_cast<const float*>(rows.a[r]) + s * 2;
        acc[r][v] = f_fma(even, f_set(x[0]), acc[r][v]);
        acc[r][v] = f_fma(odd, f_set(x[1]), acc[r][v]);
      }
    }
  }
#endif
};
