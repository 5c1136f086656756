// Cuts a tile product into register blocks of up to kMaxRows activation rows by kVectors
// vectors of weight rows. Every output is one chain of operations in ascending k whatever its
// block, so results do not depend on how many rows come together.
template <int M> struct Rows {
  const uint8_t* a[M];
  int64_t id[M];
};

template <int M> inline Rows<M> rows_at(const ActRows& a, int64_t first) {
  Rows<M> rows;
  for (int r = 0; r < M; ++r) {
    rows.id[r] = a.index ? a.index[first + r] : first + r;
    rows.a[r] = a.data + rows.id[r] * a.stride;
  }
  return rows;
}

// Block::run<M, V>(tile, layout, a, rows, lane, out): M rows, V vectors starting at `lane`.
template <class Block, int M, int V>
inline void row_block(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                      int64_t first, float* out) {
  const Rows<M> rows = rows_at<M>(a, first);
  for (int lane = 0; lane < kTileRows; lane += V * kLanes)
    Block::template run<M, V>(tile, layout, a, rows, lane, out + first * kTileRows + lane);
}

template <class Block>
void vector_product(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                    float* out) {
  constexpr int kAll = kTileRows / kLanes;
  constexpr int kM = Block::kMaxRows, kV = Block::kVectors;
  int64_t r = 0;
  for (; r + kM <= m; r += kM) row_block<Block, kM, kV>(tile, layout, a, r, out);
  if constexpr (kM > 4) {
    if (r + 4 <= m) row_block<Block, 4, kV>(tile, layout, a, r, out), r += 4;
  }
  if (r + 2 <= m) row_block<Block, 2, kV>(tile, layout, a, r, out), r += 2;
  if (r < m) row_block<Block, 1, kAll>(tile, layout, a, r, out);
}

inline int32_t load_i32(const uint8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}
