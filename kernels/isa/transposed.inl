// Products with the transpose of packed weights (kt/training.h), on the vector units. A stretch of
// rows of W is unpacked by columns, as the GEMM kernels of float32 do it, and turned round, so that
// it becomes a stretch of columns of the transpose; then the forward kernels run over it. All of it
// stays in a cache while all m rows go by. Tiles have their own way (transposed_amx.inl).

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

// The packed bytes of some columns of a stretch of tiles, to be prefetched while the stretch before
// is used. Past the last tile lies the next matrix or expert.
struct AheadTiles {
  const uint8_t* from;
  int64_t stride, tiles, bytes;  // from tile to tile, how many, of each

  // Part number `part` of `parts`.
  void fetch(int64_t part, int64_t parts) const {
    const int64_t lines = bytes / 64, end = tiles * lines * (part + 1) / parts;
    for (int64_t i = tiles * lines * part / parts; i < end; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(from + i / lines * stride + i % lines * 64),
                   _MM_HINT_T0);
  }
};
inline AheadTiles tiles_ahead(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                              int64_t column, int64_t columns, int64_t first, int64_t count) {
  const int64_t block = layout.block_bytes(), block_cols = layout.block_cols();
  const int64_t left = layout.tiles() - first;
  return {tiles + first * tile_stride + layout.head_bytes() + column / block_cols * block,
          tile_stride, left < count ? left : count, columns * block / block_cols};
}

// Bytes [from, from + bytes) of some rows of A, which the hardware's prefetching does not follow
// from row to row.
inline void prefetch_rows(const ActRows& a, int64_t first, int64_t rows, int64_t from,
                          int64_t bytes) {
  for (int64_t r = first; r < first + rows; ++r)
    for (int64_t i = 0; i < bytes; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(a.data + row_id(a, r) * a.stride + from + i),
                   _MM_HINT_T0);
}

#ifdef KT_AMX
#include "transposed_amx.inl"
#else
// A stretch of rows of W, turned round: w[tile of columns][row][32].
struct TurnedBlock {
  static constexpr int kMaxRows = FloatBlock::kMaxRows;

  const float* w;
  int64_t tile_floats, tiles;  // of a tile of columns, how many
  int64_t rows;                // of W
  const ActRows& a;
  int64_t first_row;
  float* out;
  int64_t out_stride;
  AheadTiles ahead;

  template <int M> void run(int64_t first, int64_t part, int64_t parts) const {
    ahead.fetch(part, parts);
    if (part + 1 < parts) prefetch_rows(a, first + M, M, first_row * 4, rows * 4);
    for (int64_t c = 0; c < tiles; ++c)
      FloatBlock{w + c * tile_floats, rows, a, first_row, out + c * out_stride, {}}.template run<M>(
          first, part, parts);
  }
};

template <class Columns>
void transposed_product(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                        int64_t column, const ActRows& a, int64_t m, uint8_t*, float* out,
                        int64_t out_stride) {
  constexpr int64_t kAtOnce = 4;  // tiles of W: 32 KB for 64 columns
  constexpr int64_t kTileFloats = kAtOnce * kTileRows * kTileRows;
  alignas(64) float by_column[kTransposedColumns * kTileRows];
  alignas(64) float w[kTransposedColumns / kTileRows * kTileFloats];
  const int64_t columns = transposed_columns(layout, column), n = layout.tiles();
  for (int64_t t = 0; t < n; t += kAtOnce) {
    const int64_t end = t + kAtOnce < n ? t + kAtOnce : n;
    for (int64_t i = t; i < end; ++i) {
      Columns::unpack(tiles + i * tile_stride, layout, column, columns, by_column);
      for (int64_t c = 0; c < columns; c += kTileRows)
        transpose_tile(by_column + c * kTileRows,
                       w + c / kTileRows * kTileFloats + (i - t) * kTileRows * kTileRows);
    }
    const AheadTiles ahead = tiles_ahead(tiles, tile_stride, layout, column, columns, end, kAtOnce);
    row_blocks(TurnedBlock{w, kTileFloats, columns / kTileRows, (end - t) * kTileRows, a,
                           t * kTileRows, out, out_stride, ahead},
               m);
  }
}
#endif
