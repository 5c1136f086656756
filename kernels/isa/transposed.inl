// Products with the transpose of packed weights (kt/training.h). A stretch of rows of W is unpacked
// by columns, as the GEMM kernels of float32 do it, and turned round, so that it becomes a stretch
// of columns of the transpose; then the forward kernels run over it. All of it stays in a cache
// while all m rows go by.

// 32 columns w[column][32 rows] to [row][32 columns].
inline void transpose_tile(const float* w, float* to) {
  for (int row = 0; row < kTileRows; row += kLanes)
    for (int column = 0; column < kTileRows; column += kLanes) {
      F x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = f_load(w + (column + i) * kTileRows + row);
      transpose(x);
      for (int i = 0; i < kLanes; ++i) f_store(to + (row + i) * kTileRows + column, x[i]);
    }
}

inline int64_t transposed_columns(const MatrixLayout& layout, int64_t column) {
  const int64_t left = layout.cols_padded() - column;
  return left < kTransposedColumns ? left : kTransposedColumns;
}

#ifdef KT_AMX
// Steps of bf16 pairs of rows (kt/format.h) of 32 columns w[column][32 rows]: the tile's part of
// one packed tile of the transpose.
inline void transpose_to_steps(const float* w, uint8_t* steps) {
  for (int v = 0; v < kTileVectors; ++v) {
    F pairs[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const float* column = w + (v * kLanes + i) * kTileRows;
      pairs[i] = as_f(bf16_words(f_load(column + kLanes), f_load(column)));
    }
    transpose(pairs);
    for (int i = 0; i < kLanes; ++i) i_store(steps + i * kStepBytes + v * 64, as_i(pairs[i]));
  }
}

template <class Columns>
void transposed_product(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                        int64_t column, const ActRows& a, int64_t m, uint8_t* scratch, float* out,
                        int64_t out_stride) {
  alignas(64) float w[kTransposedColumns * kTileRows];
  const MatrixLayout packed{WeightFormat::kBF16, kTileRows, layout.tiles() * kTileRows, 0};
  const int64_t columns = transposed_columns(layout, column), n = layout.tiles();
  for (int64_t t = 0; t < n; ++t) {
    Columns::unpack(tiles + t * tile_stride, layout, column, columns, w);
    for (int64_t c = 0; c < columns; c += kTileRows)
      transpose_to_steps(w + c * kTileRows,
                         scratch + c / kTileRows * packed.tile_bytes() + t * kUnitBytes);
  }
  stores_before_tile_loads();
  for (int64_t c = 0; c < columns / kTileRows; ++c)
    tile_product<Bf16Units>(scratch + c * packed.tile_bytes(), packed, a, m, out + c * out_stride);
}
#else
template <class Columns>
void transposed_product(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                        int64_t column, const ActRows& a, int64_t m, uint8_t*, float* out,
                        int64_t out_stride) {
  // Tiles of W in a stretch. Those weights that a tile of values needs are as large as a
  // first-level cache, and read in succession: shorter stretches cost more in accumulators that
  // come and go.
  constexpr int64_t kAtOnce = 8;
  alignas(64) float by_column[kTransposedColumns * kTileRows];
  alignas(64) float w[kTransposedColumns / kTileRows][kAtOnce * kTileRows * kTileRows];
  const int64_t columns = transposed_columns(layout, column), n = layout.tiles();
  const int64_t block = layout.block_bytes(), block_cols = layout.block_cols();
  const int64_t at = layout.head_bytes() + column / block_cols * block;
  for (int64_t t = 0; t < n; t += kAtOnce) {
    const int64_t end = t + kAtOnce < n ? t + kAtOnce : n;
    for (int64_t i = t; i < end; ++i) {
      Columns::unpack(tiles + i * tile_stride, layout, column, columns, by_column);
      for (int64_t c = 0; c < columns; c += kTileRows)
        transpose_tile(by_column + c * kTileRows,
                       w[c / kTileRows] + (i - t) * kTileRows * kTileRows);
    }
    for (int64_t c = 0; c < columns / kTileRows; ++c) {
      const Ahead ahead{tiles + (t + kAtOnce + c) * tile_stride + at, columns * block / block_cols};
      row_blocks(
          FloatBlock{w[c], (end - t) * kTileRows, a, t * kTileRows, out + c * out_stride, ahead},
          m);
    }
  }
}
#endif
