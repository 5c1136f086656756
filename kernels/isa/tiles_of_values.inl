// Tiles of values in training: m rows of 32 floats (kt/training.h).
void gather_columns(const uint16_t* rows, int64_t stride, const int32_t* index, const float* factor,
                    int64_t m, int64_t valid, float* out) {
  for (int64_t r = 0; r < m; ++r) {
    const uint16_t* row = rows + index[r] * stride;
    for (int n = 0; n < kTileRows; n += kLanes) {
      F x = load_row(row, DType::kBF16, n, valid);
      if (factor) x = f_mul(x, f_set(factor[r]));
      f_store(out + r * kTileRows + n, x);
    }
  }
}

void keep_tile(const float* values, const float* more, int64_t m, float* to, int64_t stride) {
  for (int64_t r = 0; r < m; ++r)
    for (int n = 0; n < kTileRows; n += kLanes) {
      F x = f_load(values + r * kTileRows + n);
      if (more) x = f_add(x, f_load(more + r * kTileRows + n));
      f_stream(to + r * stride + n, x);
    }
  _mm_sfence();  // before a barrier lets others read them
}

void add_tile(float* to, const float* from, const float* bias, int64_t m) {
  for (int64_t r = 0; r < m; ++r)
    for (int n = 0; n < kTileRows; n += kLanes) {
      F x = f_load(to + r * kTileRows + n);
      if (from) x = f_add(x, f_load(from + r * kTileRows + n));
      if (bias) x = f_add(x, f_load(bias + n));
      f_store(to + r * kTileRows + n, x);
    }
}

// With the operations of merge_tile for each sum, and those of finish_columns for the sums.
void sum_rows(const WeightedRow* rows, const int* end, int sums, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    F total = f_zero();
    for (int s = 0, r = 0; s < sums; ++s) {
      F sum = f_zero();
      for (; r < end[s]; ++r) sum = f_fma(f_set(rows[r].weight), f_load(rows[r].values + i), sum);
      total = f_add(total, sum);
    }
    store_some(out + i, DType::kBF16, total, n - i);
  }
}
