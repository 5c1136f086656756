// Splits a product into blocks of up to four activation rows, each of which reads the tile once.
// Every output is one chain of operations in ascending k, independent of its block, so results do
// not depend on how many rows are computed together.
constexpr int kTileVectors = kTileRows / kLanes;  // of a step

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

// How many vectors of a step M rows process at a time if each row needs `registers` accumulators
// per vector: `most`, or as many as fit into half of the register file. With fewer than
// kTileVectors, a kernel passes several times over a few columns, and reads the weights from L1
// after the first pass.
constexpr int vectors_at_once(int rows, int registers, int most) {
  while (most > 1 && rows * most * registers > kRegisters / 2) most /= 2;
  return most;
}

// Block::run<M>(tile, layout, a, rows, out) multiplies the M rows `rows`, of kind Block::kAct, with
// the whole tile.
template <class Block, int M>
inline void row_block(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                      int64_t first, float* out) {
  Block::template run<M>(tile, layout, a, rows_at<M>(a, first), out + first * kTileRows);
}

template <class Block>
void vector_product(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                    float* out) {
  for (int64_t r = 0; r < m; r += 4) switch (m - r) {
      case 1: row_block<Block, 1>(tile, layout, a, r, out); break;
      case 2: row_block<Block, 2>(tile, layout, a, r, out); break;
      case 3: row_block<Block, 3>(tile, layout, a, r, out); break;
      default: row_block<Block, 4>(tile, layout, a, r, out); break;
    }
}

// Two ways to keep the compiler from wasting registers. The first hides the origin of a pointer, so
// that loads through it stay in a loop instead of being hoisted and spilled: broadcasts from memory
// cost no more than reads of the stack. The second makes the compiler read back what was stored.
inline const uint8_t* reload(const uint8_t* p) {
  asm("" : "+r"(p));
  return p;
}
template <class T, int N> inline void settle(T (&x)[N]) { asm("" : "+m"(x)); }

// The hardware prefetcher does not run far enough ahead of a kernel that computes on what it reads.
// 2 KB ahead was the fastest of 1 to 8 KB. The next tile follows the end of a tile.
constexpr int64_t kPrefetchBytes = 2048;
inline void prefetch_lines(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i + kPrefetchBytes);
}
inline void prefetch_steps(const uint8_t* w, int steps) { prefetch_lines(w, steps * kStepBytes); }

inline int32_t load_i32(const uint8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

template <int M> inline void zero_rows(F (&total)[M][kTileVectors]) {
  for (auto& row : total)
    for (F& x : row) x = f_zero();
}

template <int M> inline void store_rows(const F (&x)[M][kTileVectors], float* out) {
  for (int r = 0; r < M; ++r)
    for (int v = 0; v < kTileVectors; ++v) f_store(out + r * kTileRows + v * kLanes, x[r][v]);
}
