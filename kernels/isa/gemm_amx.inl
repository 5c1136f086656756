// AMX tile kernels. The columns of a packed tile are processed in stretches, whose B operand stays
// in L1 while all m rows are multiplied with it. (A step of the packed layout is one row of both B
// tiles.) A streams from L2; its loads carry a non-temporal hint, because in L1 it would evict B.
// Between the products, the vector unit prepares the next stretch of B. Rows come in blocks of 32
// or 16, with 2x2 or 1x2 accumulators (tiles 0-3), A in tile 4 and B in tile 5. Rows past m are
// computed on the buffers' extra rows and not used.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Not a local: GCC 12 assumes that the load reads only 8 bytes, and removes the stores to the rest
// of a local.
constexpr TileConfig kTileConfig;
void tiles_begin() { _tile_loadconfig(&kTileConfig); }
void tiles_end() { _tile_release(); }

// The compiler does not know that _tile_loadd reads memory. Vector stores to the memory that it
// reads must not be moved past this.
inline void stores_before_tile_loads() { asm volatile("" ::: "memory"); }

// A unit of B is the operand of one product, 16 steps: 32 columns of bf16 or 64 of int8. A unit of
// 16 A rows is a tile, 64 bytes of each row. A stretch takes 8 KB, or twice that if it is unpacked
// to a buffer, which leaves half of L1 to the sibling thread.
constexpr int64_t kUnitBytes = 16 * kStepBytes;
constexpr int64_t kBlockBytes = kBlockRows * kChunkBytes;
constexpr int64_t kStretchUnits = 4;

// B is prepared in pieces of 4 steps, so that the work spreads evenly over the products.
constexpr int64_t kUnitPieces = 4;
constexpr int64_t kPieceBytes = kUnitBytes / kUnitPieces;

// Prefetches the packed bytes of the piece that is 8 units after the one at p. Past the end of a
// tile, this is the next tile of the stream.
template <int64_t bytes> inline void prefetch_ahead(const uint8_t* p) {
  constexpr int64_t kDistance = 8 * kUnitPieces * bytes;
  for (int64_t i = 0; i < bytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p + kDistance + i), _MM_HINT_T1);
}

// B if the packed steps are already what the tile unit takes. A kernel needs of B: unit(u);
// prepare(p), which is called for every piece in ascending order at least a stretch ahead; and
// finish(), which converts the accumulators of m rows in `out` to the result.
template <bool integer> struct PackedUnits {
  static constexpr bool kInteger = integer;
  const uint8_t* steps;
  const uint8_t* unit(int64_t u) const { return steps + u * kUnitBytes; }
  void prepare(int64_t p) const { prefetch_ahead<kPieceBytes>(steps + p * kPieceBytes); }
};

// B if steps are unpacked, to a buffer of two stretches.
template <bool integer> struct UnpackedUnits {
  static constexpr bool kInteger = integer;
  static constexpr int64_t kPieces = 2 * kStretchUnits * kUnitPieces;
  alignas(64) uint8_t buffer[kPieces * kPieceBytes];
  uint8_t* piece(int64_t p) { return buffer + p % kPieces * kPieceBytes; }
  const uint8_t* unit(int64_t u) { return piece(u * kUnitPieces); }
};

// Prepares B at an even rate.
template <class B> struct Pace {
  B& b;
  int64_t ready = 0;                   // pieces
  int64_t end = 0, due = 0, rate = 0;  // the last two in 1/1024 pieces
  // Pieces before `to` must be ready after `products` steps.
  void stretch(int64_t to, int64_t products) {
    end = to;
    due = ready * 1024;
    rate = (to - ready) * 1024 / products + 1;
  }
  void step() {
    due += rate;
    const int64_t to = due / 1024 < end ? due / 1024 : end;
    while (ready < to) b.prepare(ready++);
    stores_before_tile_loads();
  }
};

// The address of accumulator `tile` of the block at c: 32 values of 4 bytes per row.
template <class Byte> inline Byte* accumulator(Byte* c, int tile) {
  return c + tile / 2 * 16 * kStepBytes + tile % 2 * 64;
}

// What happens to the accumulators before the first product of a block: those of the previous block
// are stored if `store` is not null. Then they start from zero, from `load`, or unchanged.
struct Accumulators {
  uint8_t* store;
  const uint8_t* load;
  bool zero;
};
// Macros, because GCC 12 pastes tile numbers into the instruction.
#define KT_BEGIN(tile)                                                         \
  if (acc.store) _tile_stored(tile, accumulator(acc.store, tile), kStepBytes); \
  if (acc.zero)                                                                \
    _tile_zero(tile);                                                          \
  else if (acc.load)                                                           \
  _tile_loadd(tile, accumulator(acc.load, tile), kStepBytes)
#define KT_DOT(tile, a, b)    \
  if constexpr (integer)      \
    _tile_dpbssd(tile, a, b); \
  else                        \
    _tile_dpbf16ps(tile, a, b)

// The operands of a product of 16 or 32 rows: a, of 16 rows, and `below`, of the next 16; both
// column tiles of b.
struct Operands {
  const uint8_t *a, *below, *b;
};

// A and B have one tile each, which is loaded again before each product. With two of each, there
// would be one load less. But two threads of a core share the registers that tiles are renamed to,
// and eight tiles in use leave too few of them: a product then takes 34 ns instead of 24 on such a
// core, and 11 on a core of its own in either way (docs/performance.md).
inline void load_a(const uint8_t* a) { _tile_stream_loadd(4, a, kChunkBytes); }
inline void load_b(const uint8_t* b) { _tile_loadd(5, b, kStepBytes); }
inline void load(const Operands& o) {
  load_a(o.a);
  load_b(o.b);
}

// Multiplies; `load` was called before. In the first product of a block, the accumulators are
// switched one by one, so that the tile unit always has one to work on.
template <bool integer, bool two, bool first>
inline void multiply(const Operands& o, const Accumulators& acc) {
  if constexpr (first) {
    KT_BEGIN(0);
  }
  KT_DOT(0, 4, 5);
  load_b(o.b + 64);
  if constexpr (first) {
    KT_BEGIN(1);
  }
  KT_DOT(1, 4, 5);
  if constexpr (two) {
    load_a(o.below);
    if constexpr (first) {
      KT_BEGIN(3);
    }
    KT_DOT(3, 4, 5);
    load_b(o.b);
    if constexpr (first) {
      KT_BEGIN(2);
    }
    KT_DOT(2, 4, 5);
  }
}

// The same for 32 rows and the first column tile of b.
template <bool first> inline void multiply_narrow(const Operands& o, const Accumulators& acc) {
  constexpr bool integer = false;
  if constexpr (first) {
    KT_BEGIN(0);
  }
  KT_DOT(0, 4, 5);
  load_a(o.below);
  if constexpr (first) {
    KT_BEGIN(2);
  }
  KT_DOT(2, 4, 5);
}

// Stores the accumulators of 16 or 32 rows.
inline void store_block(uint8_t* c, bool two) {
  _tile_stored(0, accumulator(c, 0), kStepBytes);
  _tile_stored(1, accumulator(c, 1), kStepBytes);
  if (!two) return;
  _tile_stored(2, accumulator(c, 2), kStepBytes);
  _tile_stored(3, accumulator(c, 3), kStepBytes);
}
inline void store_narrow(uint8_t* c) {
  _tile_stored(0, accumulator(c, 0), kStepBytes);
  _tile_stored(2, accumulator(c, 2), kStepBytes);
}
#undef KT_BEGIN
#undef KT_DOT

// One block of rows and the units that it is multiplied with.
struct Block {
  const uint8_t* a;  // of unit 0; null if there is no product
  int64_t unit;      // the first one
  bool two;          // 32 rows
};
template <class B> inline Operands operands(B& b, const Block& block, int64_t stride) {
  const uint8_t* a = block.a + block.unit * kBlockBytes;
  return {a, a + kBlockRows * stride, b.unit(block.unit)};
}

// Multiplies a block with units up to `end`. The operands of a product are loaded before the vector
// work that precedes it, so that they arrive during it. The caller has loaded the first ones; this
// loads those of `next`.
template <bool two, class B>
inline void multiply_block(B& b, Pace<B>& pace, Block block, int64_t end, const Block& next,
                           int64_t stride, const Accumulators& acc) {
  constexpr bool integer = B::kInteger;
  multiply<integer, two, true>(operands(b, block, stride), acc);
  while (++block.unit < end) {
    const Operands o = operands(b, block, stride);
    load(o);
    pace.step();
    multiply<integer, two, false>(o, acc);
  }
  if (next.a) load(operands(b, next, stride));
  pace.step();
}

// Multiplies m rows with all units of B.
template <class B>
void multiply_rows(B& b, int64_t units, const ActRows& a, int64_t m, float* out) {
  Pace<B> pace{b};
  const int64_t blocks = ceil_div(m, 32);
  const auto stretch_end = [&](int64_t u) {
    return u + kStretchUnits < units ? u + kStretchUnits : units;
  };
  pace.stretch(stretch_end(0) * kUnitPieces, 1);
  pace.step();
  const auto block = [&](int64_t row, int64_t unit) {
    return Block{unit < units ? a.data + row * a.stride : nullptr, unit, m - row > 16};
  };
  load(operands(b, block(0, 0), a.stride));
  uint8_t* pending = nullptr;  // where to store the accumulators of the last block
  bool pending_two = false;
  for (int64_t first = 0; first < units; first = stretch_end(first)) {
    const int64_t end = stretch_end(first);
    // Must be ready before the last step, which loads the first operands of the next stretch. A
    // stretch of one product has no next one.
    const int64_t products = blocks * (end - first);
    pace.stretch(stretch_end(end) * kUnitPieces, products > 1 ? products - 1 : 1);
    for (int64_t r = 0; r < m; r += 32) {
      auto* c = reinterpret_cast<uint8_t*>(out + r * kTileRows);
      const Block now = block(r, first), next = r + 32 < m ? block(r + 32, first) : block(0, end);
      // A single block keeps its accumulators in the tiles.
      const bool alone = blocks == 1;
      if (pending && pending_two != now.two) {
        store_block(pending, pending_two);
        pending = nullptr;
      }
      const Accumulators acc{alone ? nullptr : pending, alone ? nullptr : c, first == 0};
      if (now.two)
        multiply_block<true>(b, pace, now, end, next, a.stride, acc);
      else
        multiply_block<false>(b, pace, now, end, next, a.stride, acc);
      pending = c;
      pending_two = now.two;
    }
  }
  if (pending) store_block(pending, pending_two);
  stores_before_tile_loads();
  b.finish(a, m, out);
}

template <class B>
void tile_product(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                  float* out) {
  B b(tile, layout);
  multiply_rows(b, layout.cols_padded() / (B::kInteger ? 64 : 32), a, m, out);
}
