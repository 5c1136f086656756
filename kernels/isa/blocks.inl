// Cuts a product into blocks of up to four activation rows, each of which goes over the tile once.
// Every output is one chain of operations in ascending k whatever its block, so results do not
// depend on how many rows come together.
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

// How many vectors of a step M rows process at a time, if each row needs `registers` accumulators
// per vector: `most`, or as many as fit in half of the register file. With fewer than kTileVectors,
// a kernel makes several passes over a few columns, and the weights come from L1 after the first.
constexpr int vectors_at_once(int rows, int registers, int most) {
  while (most > 1 && rows * most * registers > kRegisters / 2) most /= 2;
  return most;
}

// Block::run<M>(tile, layout, a, rows, out): the M rows `rows`, of kind Block::kAct, by all of the
// tile.
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

// Two ways to keep the compiler from wasting registers. The first hides what a pointer is, so that
// loads by it stay where they are, instead of being taken out of a loop and spilled: broadcasts
// from memory are as cheap as reads of the stack. The second makes it read what was stored.
inline const uint8_t* reload(const uint8_t* p) {
  asm("" : "+r"(p));
  return p;
}
template <class T, int N> inline void settle(T (&x)[N]) { asm("" : "+m"(x)); }

// The processor's own prefetching follows a kernel that computes on what it reads only so far: 2 KB
// ahead measured best of 1 to 8 KB. Past the end of a tile lies the next one.
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
