// Weights as float32 (unpack_float.inl) and A rows of floats: one FMA per vector of weight rows.
struct FloatBlock {
  // AVX-512: 16 accumulators of 32 registers; AVX2: 12 of 16, in both shapes.
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 6;
  static constexpr int kChunk = 16;  // columns between prefetches

  const float* w;  // [columns][32]
  int64_t columns;
  const ActRows& a;
  int64_t first_column;
  float* out;
  Ahead ahead;

  template <int M> void run(int64_t first, int64_t part, int64_t parts) const {
    constexpr int V = kLanes == 8 && M <= 3 ? 4 : 2;
    const Rows<M> rows = rows_at<M>(a, first);
    const float* x[M];
    for (int r = 0; r < M; ++r) x[r] = reinterpret_cast<const float*>(rows.a[r]) + first_column;
    const int64_t chunks = columns / kChunk;
    for (int lane = 0; lane < kTileRows; lane += V * kLanes) {
      float* y = out + first * kTileRows + lane;
      F acc[M][V];
      for (int r = 0; r < M; ++r)
        for (int v = 0; v < V; ++v)
          acc[r][v] = first_column == 0 ? f_zero() : f_load(y + r * kTileRows + v * kLanes);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (lane == 0) ahead.fetch(part * chunks + chunk, parts * chunks);
        for (int64_t k = chunk * kChunk; k < (chunk + 1) * kChunk; ++k) {
          F weight[V];
          for (int v = 0; v < V; ++v) weight[v] = f_load(w + k * kTileRows + lane + v * kLanes);
          for (int r = 0; r < M; ++r) {
            const F value = f_set(x[r][k]);
            for (int v = 0; v < V; ++v) acc[r][v] = f_fma(weight[v], value, acc[r][v]);
          }
        }
      }
      for (int r = 0; r < M; ++r)
        for (int v = 0; v < V; ++v) f_store(y + r * kTileRows + v * kLanes, acc[r][v]);
    }
  }
};

template <class Format>
void gemm_float(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                float* out) {
  alignas(64) float w[kFloatStretch * kTileRows];
  const int64_t k_end = layout.cols_padded();
  // With few rows, the kernel waits for memory, and short bursts of prefetches disturb less.
  const int64_t stretch = m <= 16 ? kFloatStretch / 2 : kFloatStretch;
  const auto at = [&](int64_t k) {
    return tile + layout.head_bytes() + k / layout.block_cols() * layout.block_bytes();
  };
  for (int64_t k = 0; k < k_end; k += stretch) {
    const int64_t columns = k_end - k < stretch ? k_end - k : stretch;
    Format::unpack(tile, layout, k, columns, w);
    const uint8_t* next = at(k + stretch);
    row_blocks(FloatBlock{w, columns, a, k, out, {next, next - at(k)}}, m);
  }
}
