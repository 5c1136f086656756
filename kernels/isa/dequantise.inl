// The last step of GEMM kernels with integer products and scales per row.
inline int64_t row_id(const ActRows& a, int64_t r) { return a.index ? a.index[r] : r; }

// Converts int32 accumulators to floats, in place.
inline void dequantise_rows(const uint8_t* tile, const ActRows& a, int64_t m, float* out) {
  const auto* scale = reinterpret_cast<const float*>(tile);
  for (int64_t r = 0; r < m; ++r)
    for (int n = 0; n < kTileRows; n += kLanes) {
      float* x = out + r * kTileRows + n;
      f_store(x, dequantise(i_load(x), f_load(scale + n), a.scale[row_id(a, r)]));
    }
}
