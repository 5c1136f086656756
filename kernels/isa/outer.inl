// Sums over rows of outer products, in float32 (kt/training.h): gradients of weights. Accumulators
// of a few rows of the result stay in registers while all m rows go by, each one chain of
// operations in ascending order.
constexpr int kOuterRows = kLanes == 16 ? 8 : 6;

template <int M>
inline void outer_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                       int64_t m, float* out) {
  constexpr int V = 2;
  for (int lane = 0; lane < kTileRows; lane += V * kLanes) {
    F acc[M][V];
    for (int i = 0; i < M; ++i)
      for (int v = 0; v < V; ++v) acc[i][v] = f_load(out + i * kTileRows + lane + v * kLanes);
    const float *x = a, *y = b + lane;
    for (int64_t r = 0; r < m; ++r, x += a_stride, y += b_stride) {
      F row[V];
      for (int v = 0; v < V; ++v) row[v] = f_load(y + v * kLanes);
      for (int i = 0; i < M; ++i) {
        const F value = f_set(x[i]);
        for (int v = 0; v < V; ++v) acc[i][v] = f_fma(value, row[v], acc[i][v]);
      }
    }
    for (int i = 0; i < M; ++i)
      for (int v = 0; v < V; ++v) f_store(out + i * kTileRows + lane + v * kLanes, acc[i][v]);
  }
}

template <int M = kOuterRows>
inline void last_outer_rows(int64_t n, const float* a, int64_t a_stride, const float* b,
                            int64_t b_stride, int64_t m, float* out) {
  if (n == M) return outer_rows<M>(a, a_stride, b, b_stride, m, out);
  if constexpr (M > 1) last_outer_rows<M - 1>(n, a, a_stride, b, b_stride, m, out);
}

void outer_product(const float* a, int64_t a_stride, int64_t n, const float* b, int64_t b_stride,
                   int64_t m, float* out) {
  for (int64_t parts = ceil_div(n, kOuterRows), i = 0; parts > 0; --parts) {
    const int64_t rows = ceil_div(n - i, parts);
    last_outer_rows(rows, a + i, a_stride, b, b_stride, m, out + i * kTileRows);
    i += rows;
  }
}
