// Integer weights with a scale per row. The int32 accumulators are exact and stay in `out` until
// the scales convert them to floats, bit for bit as in gemv_int.inl.

// The operands of a block of rows.
struct IntStretch {
  const uint8_t* w;
  int64_t columns;
  const ActRows& a;
  int64_t first_column;
  float* out;
  Ahead ahead;
};

template <int M, int V> inline void load_sums(const float* y, I (&acc)[M][V]) {
  for (int r = 0; r < M; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = i_load(y + r * kTileRows + v * kLanes);
}
template <int M, int V> inline void store_sums(const I (&acc)[M][V], float* y) {
  for (int r = 0; r < M; ++r)
    for (int v = 0; v < V; ++v) i_store(y + r * kTileRows + v * kLanes, acc[r][v]);
}

#ifdef KT_VNNI
#include "gemm_vnni.inl"
#else
#include "gemm_maddubs.inl"
#endif

// Unpacks a 4-bit stretch to 8-bit steps of u.
inline void unpack_nibbles(const uint8_t* p, int64_t columns, uint8_t* dst) {
  const I mask = i_set(0x0f0f0f0f);
  for (int64_t k = 0; k < columns; k += 8, p += kStepBytes, dst += 2 * kStepBytes)
    for (int n = 0; n < kTileRows * 4; n += kLanes * 4) {
      const I both = i_load(p + n);
      i_store(dst + n, i_and(both, mask));
      i_store(dst + kStepBytes + n, i_and(i_srl<4>(both), mask));
    }
}

void gemm_int4_row(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                   float* out) {
  constexpr int64_t kStretch = 512;  // 16 KB of u
  alignas(64) uint8_t w[kStretch / 4 * kStepBytes];
  for (int64_t r = 0; r < m; ++r)  // u = q + 8
    for (int n = 0; n < kTileRows; n += kLanes)
      i_store(out + r * kTileRows + n, i_set(-8 * a.sum[row_id(a, r)]));
  const uint8_t* packed = tile + layout.head_bytes();
  const int64_t k_end = layout.cols_padded();
  for (int64_t k = 0; k < k_end; k += kStretch) {
    const int64_t columns = k_end - k < kStretch ? k_end - k : kStretch;
    const int64_t bytes = columns / 8 * kStepBytes;
    unpack_nibbles(packed, columns, w);
    packed += bytes;
    row_blocks(NibbleBlock{{w, columns, a, k, out, {packed, bytes}}}, m);
  }
  dequantise_rows(tile, a, m, out);
}
