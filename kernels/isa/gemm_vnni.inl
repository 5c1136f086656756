// dpbusd: four products per lane; one operand is unsigned.

// M rows of 8-bit steps. The unsigned operand is A if unsigned_a, otherwise W.
template <int M, bool unsigned_a>
inline void dpbusd_rows(const IntStretch& s, const uint8_t* const (&x)[M], int64_t first,
                        int64_t part, int64_t parts) {
  constexpr int V = 2, kChunk = 16;
  const int64_t chunks = s.columns / 4 / kChunk;
  for (int lane = 0; lane < kTileRows; lane += V * kLanes) {
    float* y = s.out + first * kTileRows + lane;
    I acc[M][V];
    load_sums(y, acc);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (lane == 0) s.ahead.fetch(part * chunks + chunk, parts * chunks);
      for (int64_t step = chunk * kChunk; step < (chunk + 1) * kChunk; ++step) {
        I w[V];
        for (int v = 0; v < V; ++v)
          w[v] = i_load(s.w + step * kStepBytes + (lane + v * kLanes) * 4);
        for (int r = 0; r < M; ++r) {
          const I value = i_set(load_i32(x[r] + step * 4));
          for (int v = 0; v < V; ++v)
            acc[r][v] = unsigned_a ? _mm512_dpbusd_epi32(acc[r][v], value, w[v])
                                   : _mm512_dpbusd_epi32(acc[r][v], w[v], value);
        }
      }
    }
    store_sums(acc, y);
  }
}

struct NibbleBlock : IntStretch {
  static constexpr int kMaxRows = 8;
  template <int M> void run(int64_t first, int64_t part, int64_t parts) const {
    const Rows<M> rows = rows_at<M>(a, first);
    const uint8_t* x[M];
    for (int r = 0; r < M; ++r) x[r] = rows.a[r] + first_column;
    dpbusd_rows<M, false>(*this, x, first, part, parts);
  }
};

constexpr int64_t kInt8Stretch = 512;  // columns: 16 KB

struct Int8RowBlock : IntStretch {  // activations are offset by 128
  static constexpr int kMaxRows = 8;
  template <int M> void run(int64_t first, int64_t part, int64_t parts) const {
    const Rows<M> rows = rows_at<M>(a, first);
    alignas(64) uint8_t offset[M][kInt8Stretch];
    const uint8_t* x[M];
    for (int r = 0; r < M; ++r) {
      x[r] = offset[r];
      for (int64_t k = 0; k < columns; k += 64)
        i_store(offset[r] + k,
                i_xor(i_load(rows.a[r] + first_column + k), i_set(int32_t(0x80808080))));
    }
    dpbusd_rows<M, true>(*this, x, first, part, parts);
  }
};

void gemm_int8_row(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                   float* out) {
  const auto* sum = reinterpret_cast<const int32_t*>(tile) + kTileRows;
  for (int n = 0; n < kTileRows; n += kLanes) {
    const I start = i_sub(i_zero(), i_sll<7>(i_load(sum + n)));
    for (int64_t r = 0; r < m; ++r) i_store(out + r * kTileRows + n, start);
  }
  const uint8_t* w = tile + layout.head_bytes();
  const int64_t k_end = layout.cols_padded();
  for (int64_t k = 0; k < k_end; k += kInt8Stretch) {
    const int64_t columns = k_end - k < kInt8Stretch ? k_end - k : kInt8Stretch;
    const int64_t bytes = columns / 4 * kStepBytes;
    row_blocks(Int8RowBlock{{w, columns, a, k, out, {w + bytes, bytes}}}, m);
    w += bytes;
  }
  dequantise_rows(tile, a, m, out);
}
