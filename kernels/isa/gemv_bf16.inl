// BF16 weights, vector units. A lane holds two consecutive k; shifting and masking make floats.
#ifdef KT_BF16_OPERANDS
struct Bf16Block {  // dpbf16ps: two products a lane, A rows of bf16 pairs
  static constexpr int kMaxRows = 8, kVectors = 2;
  template <int M, int V>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows&,
                         const Rows<M>& rows, int lane, float* out) {
    F acc[M][V];
    for (auto& row : acc)
      for (F& x : row) x = f_zero();
    const int64_t steps = layout.cols_padded() / 2;
    const uint8_t* w = tile + lane * 4;
    for (int64_t s = 0; s < steps; ++s, w += kStepBytes) {
      I step[V];
      for (int v = 0; v < V; ++v) step[v] = i_load(w + v * kLanes * 4);
      for (int r = 0; r < M; ++r) {
        const I x = i_set(load_i32(rows.a[r] + s * 4));
        for (int v = 0; v < V; ++v)
          acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)step[v], (__m512bh)x);
      }
    }
    for (int r = 0; r < M; ++r)
      for (int v = 0; v < V; ++v) f_store(out + r * kTileRows + v * kLanes, acc[r][v]);
  }
};
#else
struct Bf16Block {  // float32 FMA, A rows of floats that hold bf16 values
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 4, kVectors = 2;
  template <int M, int V>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows&,
                         const Rows<M>& rows, int lane, float* out) {
    F acc[M][V];
    for (auto& row : acc)
      for (F& x : row) x = f_zero();
    const I upper = i_set(int32_t(0xffff0000));
    const int64_t steps = layout.cols_padded() / 2;
    const uint8_t* w = tile + lane * 4;
    for (int64_t s = 0; s < steps; ++s, w += kStepBytes) {
      F even[V], odd[V];
      for (int v = 0; v < V; ++v) {
        const I step = i_load(w + v * kLanes * 4);
        even[v] = as_f(i_sll<16>(step));
        odd[v] = as_f(i_and(step, upper));
      }
      for (int r = 0; r < M; ++r) {
        const auto* x = reinterpret_cast<const float*>(rows.a[r]) + s * 2;
        for (int v = 0; v < V; ++v) acc[r][v] = f_fma(even[v], f_set(x[0]), acc[r][v]);
        for (int v = 0; v < V; ++v) acc[r][v] = f_fma(odd[v], f_set(x[1]), acc[r][v]);
      }
    }
    for (int r = 0; r < M; ++r)
      for (int v = 0; v < V; ++v) f_store(out + r * kTileRows + v * kLanes, acc[r][v]);
  }
};
#endif
