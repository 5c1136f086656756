// The weighted sum over experts and its conversion to the output (kernel_table.h).
void merge_tile(const float* out, const float* bias, const float* weight, const int32_t* token,
                int64_t m, float* acc) {
  for (int64_t r = 0; r < m; ++r) {
    const F w = f_set(weight ? weight[r] : 1.0f);
    float* dst = acc + int64_t(token[r]) * kTileRows;
    for (int n = 0; n < kTileRows; n += kLanes) {
      F y = f_load(out + r * kTileRows + n);
      if (bias) y = f_add(y, f_load(bias + n));
      f_store(dst + n, f_fma(w, y, f_load(dst + n)));
    }
  }
}

// Starts from +0, so that a part that has only zeros changes no bit (a part may be -0).
void finish_columns(const float* const* part, int parts, const float* add, int64_t n, void* dst,
                    DType dtype) {
  for (int64_t i = 0; i < n; i += kLanes) {
    F y = f_zero();
    for (int p = 0; p < parts; ++p) y = f_add(y, f_load(part[p] + i));
    if (add) y = f_add(y, load_row(add, DType::kFP32, i, n));
    store_some(static_cast<uint8_t*>(dst) + i * dtype_bytes(dtype), dtype, y, n - i);
  }
}
