// Products without dpbusd. INT4: maddubs of u and int8 activations is at most 2 * 15 * 127 = 3810,
// so eight of them are added in 16 bits before a madd widens them. INT8 would saturate, so weights
// are first widened to 16 bits (once for all rows), and activations, too (once for all weight
// rows), for madd.
struct NibbleBlock : IntStretch {
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 6;
  static constexpr int kChunk = 8;  // steps of 4 columns
  static_assert(kChunk * 2 * 15 * 127 < 32768);

  template <int M> void run(int64_t first, int64_t part, int64_t parts) const {
    constexpr int V = kLanes == 8 && M <= 3 ? 4 : 2;
    const Rows<M> rows = rows_at<M>(a, first);
    const int64_t chunks = columns / 4 / kChunk;
    for (int lane = 0; lane < kTileRows; lane += V * kLanes) {
      float* y = out + first * kTileRows + lane;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (lane == 0) ahead.fetch(part * chunks + chunk, parts * chunks);
        I acc[M][V];
        for (auto& row : acc)
          for (I& x : row) x = i_zero();
        for (int64_t step = chunk * kChunk; step < (chunk + 1) * kChunk; ++step) {
          I u[V];
          for (int v = 0; v < V; ++v)
            u[v] = i_load(w + step * kStepBytes + (lane + v * kLanes) * 4);
          for (int r = 0; r < M; ++r) {
            const I x = i_set(load_i32(rows.a[r] + first_column + step * 4));
            for (int v = 0; v < V; ++v) acc[r][v] = dot_codes(acc[r][v], u[v], x);
          }
        }
        for (int r = 0; r < M; ++r)
          for (int v = 0; v < V; ++v) {
            float* sum = y + r * kTileRows + v * kLanes;
            i_store(sum, i_add(i_load(sum), dot_total(acc[r][v])));
          }
      }
    }
  }
};

constexpr int64_t kInt8Stretch = 256;  // columns: 16 KB in 16 bits

// The even and the odd bytes of each lane, sign-extended, as two pairs of columns.
inline I even_bytes(I x) { return i_sra16<8>(i_sll16<8>(x)); }
inline I odd_bytes(I x) { return i_sra16<8>(x); }

struct Int8RowBlock : IntStretch {  // w: for each step, its even bytes, then its odd bytes
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 6;

  template <int M> void run(int64_t first, int64_t part, int64_t parts) const {
    constexpr int V = kLanes == 8 && M <= 3 ? 4 : 2;
    const Rows<M> rows = rows_at<M>(a, first);
    alignas(64) int32_t pairs[M][kInt8Stretch / 2];  // kLanes steps: their even, then odd bytes
    const int64_t chunks = columns / 4 / kLanes;
    for (int r = 0; r < M; ++r)
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const I x = i_load(rows.a[r] + first_column + chunk * kLanes * 4);
        i_store(pairs[r] + chunk * 2 * kLanes, even_bytes(x));
        i_store(pairs[r] + chunk * 2 * kLanes + kLanes, odd_bytes(x));
      }
    for (int lane = 0; lane < kTileRows; lane += V * kLanes) {
      float* y = out + first * kTileRows + lane;
      I acc[M][V];
      load_sums(y, acc);
      const uint8_t* p = w + lane * 4;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (lane == 0) ahead.fetch(part * chunks + chunk, parts * chunks);
        for (int64_t x = chunk * 2 * kLanes; x < (chunk * 2 + 1) * kLanes; ++x)
          for (int half = 0; half < 2; ++half, p += kStepBytes) {
            I pair[V];
            for (int v = 0; v < V; ++v) pair[v] = i_load(p + v * kLanes * 4);
            for (int r = 0; r < M; ++r) {
              const I value = i_set(pairs[r][x + half * kLanes]);
              for (int v = 0; v < V; ++v) acc[r][v] = dot_pairs(acc[r][v], pair[v], value);
            }
          }
      }
      store_sums(acc, y);
    }
  }
};

void gemm_int8_row(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                   float* out) {
  alignas(64) uint8_t w[kInt8Stretch / 4 * 2 * kStepBytes];
  for (int64_t r = 0; r < m * kTileRows; r += kLanes) i_store(out + r, i_zero());
  const uint8_t* packed = tile + layout.head_bytes();
  const int64_t k_end = layout.cols_padded();
  for (int64_t k = 0; k < k_end; k += kInt8Stretch) {
    const int64_t columns = k_end - k < kInt8Stretch ? k_end - k : kInt8Stretch;
    uint8_t* dst = w;
    for (int64_t c = 0; c < columns; c += 4, packed += kStepBytes, dst += 2 * kStepBytes)
      for (int n = 0; n < kTileRows * 4; n += kLanes * 4) {
        const I step = i_load(packed + n);
        i_store(dst + n, even_bytes(step));
        i_store(dst + kStepBytes + n, odd_bytes(step));
      }
    row_blocks(Int8RowBlock{{w, columns, a, k, out, {packed, columns * kTileRows}}}, m);
  }
  dequantise_rows(tile, a, m, out);
}
