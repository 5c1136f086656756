// AMX tile kernels. The columns of a packed tile are processed in stretches, whose B operand stays
// in L1 while all m rows are multiplied with it. (A step of the packed layout is one row of both B
// tiles.) A streams from L2; its loads carry a non-temporal hint, because in L1 it would evict B.
// Between the products, the vector unit prepares the next stretch of B. Rows come in blocks of 32
// or 16, with 2x2 or 1x2 accumulators (tiles 0-3), A in tiles 4 and 5, and B in tiles 6 and 7. Rows
// past m are computed on the buffers' extra rows and not used.
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

// Loads the A and B tiles of a product of 32 or 16 rows.
inline void load_operands(const uint8_t* a, int64_t stride, const uint8_t* b, bool two) {
  _tile_stream_loadd(4, a, kChunkBytes);
  _tile_loadd(6, b, kStepBytes);
  _tile_loadd(7, b + 64, kStepBytes);
  if (two) _tile_stream_loadd(5, a + kBlockRows * stride, kChunkBytes);
}

// Multiplies the loaded operands. In the first product of a block, the accumulators are switched
// one by one, so that the tile unit always has one to work on.
template <bool integer, bool two, bool first> inline void multiply(const Accumulators& acc) {
  if constexpr (first) {
    KT_BEGIN(0);
  }
  KT_DOT(0, 4, 6);
  if constexpr (first) {
    KT_BEGIN(1);
  }
  KT_DOT(1, 4, 7);
  if constexpr (two) {
    if constexpr (first) {
      KT_BEGIN(2);
    }
    KT_DOT(2, 5, 6);
    if constexpr (first) {
      KT_BEGIN(3);
    }
    KT_DOT(3, 5, 7);
  }
}

inline void store_16(uint8_t* c) {
  _tile_stored(0, accumulator(c, 0), kStepBytes);
  _tile_stored(1, accumulator(c, 1), kStepBytes);
}
inline void store_32(uint8_t* c) {
  store_16(c);
  _tile_stored(2, accumulator(c, 2), kStepBytes);
  _tile_stored(3, accumulator(c, 3), kStepBytes);
}
#undef KT_BEGIN
#undef KT_DOT

// The addresses of a product's operands.
struct Operands {
  const uint8_t* a;  // of unit 0; null if there is no product
  int64_t unit;
  bool two;
};
template <class B> inline void load(B& b, const Operands& o, int64_t stride) {
  load_operands(o.a + o.unit * kBlockBytes, stride, b.unit(o.unit), o.two);
}

// Multiplies units from o on, up to `end`, of one block of rows. The operands of a product are
// loaded before the vector work that precedes it, so that they arrive during it. The caller has
// loaded the first ones; this loads those of `next`.
template <bool two, class B>
inline void multiply_block(B& b, Pace<B>& pace, Operands o, int64_t end, const Operands& next,
                           int64_t stride, const Accumulators& acc) {
  constexpr bool integer = B::kInteger;
  multiply<integer, two, true>(acc);
  while (++o.unit < end) {
    load(b, o, stride);
    pace.step();
    multiply<integer, two, false>(acc);
  }
  if (next.a) load(b, next, stride);
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
  const auto operands = [&](int64_t row, int64_t unit) {
    return Operands{unit < units ? a.data + row * a.stride : nullptr, unit, m - row > 16};
  };
  load(b, operands(0, 0), a.stride);
  uint8_t* pending = nullptr;  // where to store the accumulators of 32 rows
  for (int64_t first = 0; first < units; first = stretch_end(first)) {
    const int64_t end = stretch_end(first);
    // Must be ready before the last step, which loads the first operands of the next stretch. A
    // stretch of one product has no next one.
    const int64_t products = blocks * (end - first);
    pace.stretch(stretch_end(end) * kUnitPieces, products > 1 ? products - 1 : 1);
    for (int64_t r = 0; r < m; r += 32) {
      auto* c = reinterpret_cast<uint8_t*>(out + r * kTileRows);
      const Operands now = operands(r, first),
                     next = r + 32 < m ? operands(r + 32, first) : operands(0, end);
      // A single block keeps its accumulators in the tiles.
      const bool alone = blocks == 1, zero = first == 0;
      if (now.two) {
        multiply_block<true>(b, pace, now, end, next, a.stride,
                             {alone ? nullptr : pending, alone ? nullptr : c, zero});
        pending = c;
      } else {
        if (pending) store_32(pending);
        multiply_block<false>(b, pace, now, end, next, a.stride,
                              {nullptr, alone ? nullptr : c, zero});
        if (!alone || end == units) store_16(c);
        pending = nullptr;
      }
    }
  }
  if (pending) store_32(pending);
  stores_before_tile_loads();
  b.finish(a, m, out);
}

template <class B>
void tile_product(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                  float* out) {
  B b(tile, layout);
  multiply_rows(b, layout.cols_padded() / (B::kInteger ? 64 : 32), a, m, out);
}
