// Integer weights, vector units: exact int32 accumulators, then scales in float32. The float
// operations after the accumulators are the same on every instruction set and in the tile
// kernels: results are equal bit for bit.

// q * (weight scale * activation scale)
inline F dequantise(I acc, F weight_scale, float act_scale) {
  return f_mul(to_f(acc), f_mul(weight_scale, f_set(act_scale)));
}

struct Int8Block {
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 4, kVectors = kLanes == 16 ? 2 : 1;
  template <int M, int V>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                         const Rows<M>& rows, int lane, float* out) {
    I acc[M][V];
    for (auto& row : acc)
      for (I& x : row) x = i_zero();
    const int64_t steps = layout.cols_padded() / 4;
    const uint8_t* w = tile + layout.head_bytes() + lane * 4;
    for (int64_t s = 0; s < steps; ++s, w += kStepBytes) {
      Int8Weights step[V];
      for (int v = 0; v < V; ++v) step[v] = int8_weights(i_load(w + v * kLanes * 4));
      for (int r = 0; r < M; ++r) {
        I x = i_set(load_i32(rows.a[r] + s * 4));
        if constexpr (kOffsetActivations) x = i_xor(x, i_set(int32_t(0x80808080)));
        for (int v = 0; v < V; ++v) acc[r][v] = dot_int8(acc[r][v], x, step[v]);
      }
    }
    const auto* scale = reinterpret_cast<const float*>(tile) + lane;
    const auto* sum = reinterpret_cast<const int32_t*>(tile) + kTileRows + lane;
    for (int r = 0; r < M; ++r)
      for (int v = 0; v < V; ++v) {
        I x = acc[r][v];
        if constexpr (kOffsetActivations) x = i_sub(x, i_sll<7>(i_load(sum + v * kLanes)));
        f_store(out + r * kTileRows + v * kLanes,
                dequantise(x, f_load(scale + v * kLanes), a.scale[rows.id[r]]));
      }
  }
};

// The dot products of `steps` INT4 steps (8 k each) from column k on, added to acc.
template <int M, int V>
inline void nibble_steps(const uint8_t* w, int64_t steps, const Rows<M>& rows, int64_t k,
                         I (&acc)[M][V]) {
  const I mask = i_set(0x0f0f0f0f);
  for (int64_t s = 0; s < steps; ++s, w += kStepBytes, k += 8) {
    I low[V], high[V];
    for (int v = 0; v < V; ++v) {
      const I step = i_load(w + v * kLanes * 4);
      low[v] = i_and(step, mask);
      high[v] = i_and(i_srl<4>(step), mask);
    }
    for (int r = 0; r < M; ++r) {
      const I x0 = i_set(load_i32(rows.a[r] + k)), x1 = i_set(load_i32(rows.a[r] + k + 4));
      for (int v = 0; v < V; ++v) acc[r][v] = dot_nibbles(acc[r][v], low[v], high[v], x0, x1);
    }
  }
}

struct Int4RowBlock {  // u = q + 8: takes 8 * sum(activations) off the sum
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 4, kVectors = kLanes == 16 ? 2 : 1;
  template <int M, int V>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                         const Rows<M>& rows, int lane, float* out) {
    I acc[M][V];
    for (int r = 0; r < M; ++r)
      for (I& x : acc[r]) x = i_set(-8 * a.sum[rows.id[r]]);
    nibble_steps<M, V>(tile + layout.head_bytes() + lane * 4, layout.cols_padded() / 8, rows, 0,
                       acc);
    const auto* scale = reinterpret_cast<const float*>(tile) + lane;
    for (int r = 0; r < M; ++r)
      for (int v = 0; v < V; ++v)
        f_store(out + r * kTileRows + v * kLanes,
                dequantise(acc[r][v], f_load(scale + v * kLanes), a.scale[rows.id[r]]));
  }
};
