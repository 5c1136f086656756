// Integer weights with a scale per row, on the vector units: exact int32 accumulators, then scales
// in float32. The float operations after the accumulators are the same on every instruction set and
// in the tile kernels, so results are equal bit for bit.

// q * (weight scale * activation scale)
inline F dequantise(I acc, F weight_scale, float act_scale) {
  return f_mul(to_f(acc), f_mul(weight_scale, f_set(act_scale)));
}

template <int M>
inline void store_dequantised(const I (&total)[M][kTileVectors], const uint8_t* tile,
                              const ActRows& a, const Rows<M>& rows, float* out) {
  const auto* scale = reinterpret_cast<const float*>(tile);
  for (int r = 0; r < M; ++r)
    for (int v = 0; v < kTileVectors; ++v)
      f_store(out + r * kTileRows + v * kLanes,
              dequantise(total[r][v], f_load(scale + v * kLanes), a.scale[rows.id[r]]));
}

struct Int8Block {
  static constexpr ActKind kAct = ActKind::kInt8Row;

  template <int M>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                         const Rows<M>& rows, float* out) {
    I acc[M][kTileVectors];
    const uint8_t* sums = tile + kTileRows * 4;
    for (auto& row : acc)
      for (int v = 0; v < kTileVectors; ++v)
        row[v] = kOffsetActivations ? i_sub(i_zero(), i_sll<7>(i_load(sums + v * kLanes * 4)))
                                    : i_zero();
    const int64_t steps = layout.cols_padded() / 4;
    const uint8_t* w = tile + layout.head_bytes();
    for (int64_t s = 0; s < steps; ++s, w += kStepBytes) {
      prefetch_steps(w, 1);
      I x[M];
      for (int r = 0; r < M; ++r) {
        x[r] = i_set(load_i32(rows.a[r] + s * 4));
        if constexpr (kOffsetActivations) x[r] = i_xor(x[r], i_set(int32_t(0x80808080)));
      }
      for (int v = 0; v < kTileVectors; ++v) {
        const Int8Weights step = int8_weights(i_load(w + v * kLanes * 4));
        for (int r = 0; r < M; ++r) acc[r][v] = dot_int8(acc[r][v], x[r], step);
      }
    }
    store_dequantised(acc, tile, a, rows, out);
  }
};

struct Int4RowBlock {  // u = q + 8, so 8 * sum(activations) is subtracted from the sum
  static constexpr ActKind kAct = ActKind::kInt8Row;

  template <int M>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                         const Rows<M>& rows, float* out) {
    constexpr int V = vectors_at_once(M, 1, 2);
    I total[M][kTileVectors];
    for (int r = 0; r < M; ++r)
      for (I& x : total[r]) x = i_set(-8 * a.sum[rows.id[r]]);
    const uint8_t* w = tile + layout.head_bytes();
    for (int64_t k = 0; k < layout.cols_padded(); k += 32, w += 4 * kStepBytes) {
      prefetch_steps(w, 4);
      for (int first = 0; first < kTileVectors; first += V) {
        const uint8_t* x[M];
        for (int r = 0; r < M; ++r) x[r] = reload(rows.a[r] + k);
        I acc[M][V][1];
        zero_sums(acc);
        static_assert(quads_at_once<NibbleCodes>(8) == 8);
        dot_quads<NibbleCodes, 0, 8>(w + first * kLanes * 4, x, acc);
        for (int r = 0; r < M; ++r)
          for (int v = 0; v < V; ++v)
            total[r][first + v] = i_add(total[r][first + v], dot_total(acc[r][v][0]));
      }
    }
    store_dequantised(total, tile, a, rows, out);
  }
};
