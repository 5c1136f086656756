// Shared by the GEMM kernels of the vector units. A stretch of a tile's columns is unpacked once,
// to a buffer in L1. Then blocks of rows are multiplied with it. Accumulators pass through `out`
// from one stretch to the next, so every output is one chain of operations in ascending k,
// independent of the other rows.

// Prefetches the next stretch's weights to L1 while this one is used: unpack loops are too short
// and rare for the hardware prefetcher.
struct Ahead {
  const uint8_t* from;
  int64_t bytes;

  // Prefetches part number `part` of `parts`.
  void fetch(int64_t part, int64_t parts) const {
    const uint8_t* end = from + bytes * (part + 1) / parts;
    for (const uint8_t* p = from + bytes * part / parts; p < end; p += 64)
      _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  }
};

template <class Block, int M = Block::kMaxRows>
inline void row_block_of(const Block& block, int64_t first, int64_t rows, int64_t part,
                         int64_t parts) {
  if constexpr (M > 1) {
    if (rows < M) return row_block_of<Block, M - 1>(block, first, rows, part, parts);
  }
  block.template run<M>(first, part, parts);
}

// Processes m rows in blocks of nearly equal size: a block of few rows would wait for its results.
template <class Block> [[gnu::noinline]] void row_blocks(const Block& block, int64_t m) {
  const int64_t parts = ceil_div(m, Block::kMaxRows);
  for (int64_t part = 0, first = 0; part < parts; ++part) {
    const int64_t rows = ceil_div(m - first, parts - part);
    row_block_of(block, first, rows, part, parts);
    first += rows;
  }
}
