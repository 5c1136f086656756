// e4m3 weights on the vector units: float32 FMA, A rows of floats that hold bf16 values. The fp16
// form of a 16-bit step (decode.inl) is converted to vectors of pairs of columns, so an accumulator
// has the sums of even and odd columns next to each other. They are added and scaled once per part
// of the columns.

// Sums of `steps` steps for vectors [first, first + V) of each: acc[r][2v] and acc[r][2v + 1].
template <int M, int V>
inline void e4m3_steps(const uint8_t* w, int first, int64_t steps, const Rows<M>& rows, int64_t k,
                       F (&acc)[M][2 * V]) {
  for (int64_t s = 0; s < steps; ++s, w += kStepBytes, k += 4) {
    prefetch_steps(w, 1);  // in every pass, not only the first: this spreads the loads
    alignas(64) uint16_t half[2][2 * V * kLanes];
    for (int v = 0; v < V; ++v) {
      const I step = i_load(w + (first + v) * kLanes * 4);
      i_store(half[0] + 2 * v * kLanes, e4m3_even_fp16(step));
      i_store(half[1] + 2 * v * kLanes, e4m3_odd_fp16(step));
    }
    settle(half);  // converting from memory avoids the shuffle that upper halves need
    for (int p = 0; p < 2; ++p) {
      F x[M];
      for (int r = 0; r < M; ++r)
        x[r] = f_set_pair(reinterpret_cast<const float*>(rows.a[r]) + k + 2 * p);
      for (int v = 0; v < 2 * V; ++v) {
        const F both = f_load_fp16(half[p] + v * kLanes);
        for (int r = 0; r < M; ++r) acc[r][v] = f_fma(both, x[r], acc[r][v]);
      }
    }
  }
}

// Adds scale(v) * (sums of the part's products) to total.
template <int M, class Scale>
inline void e4m3_part(const uint8_t* w, int64_t steps, const Rows<M>& rows, int64_t k,
                      const Scale& scale, F (&total)[M][kTileVectors]) {
  constexpr int V = vectors_at_once(M, 2, kTileVectors);
  for (int first = 0; first < kTileVectors; first += V) {
    F acc[M][2 * V];
    for (auto& row : acc)
      for (F& x : row) x = f_zero();
    e4m3_steps<M, V>(w, first, steps, rows, k, acc);
    for (int v = 0; v < V; ++v) {
      const F s = scale(first + v);
      for (int r = 0; r < M; ++r) {
        F& sum = total[r][first + v];
        // The unit is applied to the sum, because the largest scales would overflow with it.
        sum = f_fma(f_mul(f_pair_sums(acc[r][2 * v], acc[r][2 * v + 1]), f_set(kE4m3Unit)), s, sum);
      }
    }
  }
}

struct Fp8BlockBlock {
  static constexpr ActKind kAct = ActKind::kFloat;

  template <int M>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows&,
                         const Rows<M>& rows, float* out) {
    F total[M][kTileVectors];
    zero_rows(total);
    const int64_t steps = layout.cols_padded() / 4;
    constexpr int64_t kPart = kFp8BlockSize / 4;
    const auto* scales = reinterpret_cast<const float*>(tile);
    const uint8_t* w = tile + layout.head_bytes();
    for (int64_t s = 0; s < steps; s += kPart) {
      const F scale = f_set(scales[s / kPart]);
      e4m3_part(
          w + s * kStepBytes, steps - s < kPart ? steps - s : kPart, rows, s * 4,
          [&](int) { return scale; }, total);
    }
    store_rows(total, out);
  }
};

struct Fp8RowBlock {
  static constexpr ActKind kAct = ActKind::kFloat;

  template <int M>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows&,
                         const Rows<M>& rows, float* out) {
    F total[M][kTileVectors];
    zero_rows(total);
    const int64_t steps = layout.cols_padded() / 4;
    constexpr int64_t kPart = 32;  // small enough that repeated passes read it from the cache
    const uint8_t* w = tile + layout.head_bytes();
    for (int64_t s = 0; s < steps; s += kPart)
      e4m3_part(
          w + s * kStepBytes, steps - s < kPart ? steps - s : kPart, rows, s * 4,
          [](int) { return f_set(1.0f); }, total);
    const auto* scale = reinterpret_cast<const float*>(tile);
    for (auto& row : total)
      for (int v = 0; v < kTileVectors; ++v) row[v] = f_mul(row[v], f_load(scale + v * kLanes));
    store_rows(total, out);
  }
};

struct MxFp8Block {
  static constexpr ActKind kAct = ActKind::kFloat;

  template <int M>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows&,
                         const Rows<M>& rows, float* out) {
    F total[M][kTileVectors];
    zero_rows(total);
    constexpr int64_t kSteps = 8;  // of 32 columns
    for (int64_t k = 0; k < layout.cols_padded(); k += 64, tile += 64 + 2 * kSteps * kStepBytes)
      for (int part = 0; part < 2; ++part) {
        const uint8_t* scale = tile + part * kTileRows;
        e4m3_part(
            tile + 64 + part * kSteps * kStepBytes, kSteps, rows, k + part * 32,
            [&](int v) { return load_ue8m0(scale + v * kLanes); }, total);
      }
    store_rows(total, out);
  }
};
