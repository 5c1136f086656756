// Products with the transpose of packed weights (kt/training.h), on the tile unit. The transpose of
// out = A W is W^T A^T, and the unit takes W^T as its first operand: the rows of W^T are columns of
// W, which unpack to contiguous values without a transposition. Its second operand is A^T, which is
// made once for all columns of W (turn_rows).

// A tile of W as 32 columns of rows of W^T, bf16. Row c goes to rows + c / 16 * stride + c % 16
// * 64.
template <class Columns> struct TurnedTile {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t column,
                     int64_t columns, uint8_t* rows, int64_t stride) {
    alignas(64) float w[kTransposedColumns * kTileRows];
    Columns::unpack(tile, layout, column, columns, w);
    for (int64_t c = 0; c < columns; c += kBlockRows, rows += stride)
      for (int64_t i = 0; i < kBlockRows; ++i) {
        const float* one = w + (c + i) * kTileRows;
        i_store(rows + i * kChunkBytes, bf16_words(f_load(one + kLanes), f_load(one)));
      }
  }
};

// bf16 weights need no buffer: a lane has two columns of a row of W.
template <> struct TurnedTile<Bf16Columns> {
  static void unpack(const uint8_t* tile, const MatrixLayout&, int64_t column, int64_t columns,
                     uint8_t* rows, int64_t stride) {
    const I upper = i_set(int32_t(0xffff0000));
    const uint8_t* from = tile + column / 2 * kStepBytes;
    for (int64_t c = 0; c < columns; c += kBlockRows, rows += stride)
      for (int64_t i = 0; i < kBlockRows; i += 2, from += kStepBytes) {
        const I a = i_load(from), b = i_load(from + 64);
        uint8_t* to = rows + i * kChunkBytes;
        i_store(to, bf16_words(as_f(i_sll<16>(b)), as_f(i_sll<16>(a))));
        i_store(to + kChunkBytes, bf16_words(as_f(i_and(b, upper)), as_f(i_and(a, upper))));
      }
  }
};

template <class Columns>
void turn_weights(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                  int64_t column, uint8_t* out) {
  constexpr int64_t kAhead = 2;  // tiles whose weights are on their way
  const int64_t columns = transposed_columns(layout, column), n = layout.tiles();
  const auto fetch = [&](int64_t first, int64_t count) {
    tiles_ahead(tiles, tile_stride, layout, column, columns, first, count).fetch(0, 1);
  };
  fetch(0, kAhead);
  for (int64_t t = 0; t < n; ++t) {
    fetch(t + kAhead, 1);
    TurnedTile<Columns>::unpack(tiles + t * tile_stride, layout, column, columns,
                                out + t * kBlockBytes, n * kBlockBytes);
  }
  stores_before_tile_loads();
}

// A block of the result, 32 columns of up to 32 rows, on its way from the tiles to `out`. The
// vector unit turns its quarters while the tile unit multiplies for the next block.
struct TurningBlock {
  alignas(64) float columns[kTileRows * kTileRows];  // [column][row]
  float* out = nullptr;                              // [row][32 columns]
  int rows = 0;
  int left = 0;  // quarters

  uint8_t* memory() { return reinterpret_cast<uint8_t*>(columns); }
  void turn_quarter() {
    if (!left) return;
    --left;
    const int64_t r = left / 2 * kLanes, c = left % 2 * kLanes;
    if (r >= rows) return;
    F x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = f_load(columns + (c + i) * kTileRows + r);
    transpose(x);
    for (int i = 0; i < kLanes; ++i) f_store(out + (r + i) * kTileRows + c, x[i]);
  }
  void turn() {
    while (left) turn_quarter();
  }
};

// All products of a block; its accumulators stay in the tiles. Those of the block before go to
// `before`, unless that is null.
template <bool narrow>
inline void turned_products(const TurnedTerm* terms, int count, int64_t column, int64_t row,
                            TurningBlock* before) {
  bool first = true;
  for (const TurnedTerm* term = terms; term < terms + count; ++term) {
    const int64_t stride = term->tiles * kBlockBytes;
    const uint8_t* a = term->weights + column / kBlockRows * stride;
    const uint8_t* b = term->rows + row / kTileRows * term->tiles * kUnitBytes;
    for (int64_t t = 0; t < term->tiles; ++t, a += kBlockBytes, b += kUnitBytes) {
      const Operands o{a, a + stride, b};
      load(o);
      if (first) {
        const Accumulators acc{before ? before->memory() : nullptr, nullptr, true};
        if constexpr (narrow)
          multiply_narrow<true>(o, acc);
        else
          multiply<false, true, true>(o, acc);
        stores_before_tile_loads();
        first = false;
        continue;
      }
      if (before) before->turn_quarter();
      if constexpr (narrow)
        multiply_narrow<false>(o, {});
      else
        multiply<false, true, false>(o, {});
    }
  }
  if (before) before->turn();
}

void turned_sum(const TurnedTerm* terms, int count, int64_t columns, int64_t first, int64_t m,
                float* out, int64_t out_stride) {
  TurningBlock block;
  bool wide = false;  // whether the tiles have a block of more than 16 rows
  for (int64_t r = 0; r < m; r += kTileRows)
    for (int64_t c = 0; c < columns; c += kTileRows) {
      const bool narrow = m - r <= kBlockRows;
      if (narrow && wide) {
        store_block(block.memory(), true);
        stores_before_tile_loads();
        block.turn();
        wide = false;
        block.out = nullptr;
      }
      TurningBlock* before = block.out ? &block : nullptr;
      if (narrow)
        turned_products<true>(terms, count, c, first + r, before);
      else
        turned_products<false>(terms, count, c, first + r, before);
      wide = !narrow;
      block.out = out + c / kTileRows * out_stride + r * kTileRows;
      block.rows = int(narrow ? kBlockRows : kTileRows);
      block.left = 4;
    }
  if (wide)
    store_block(block.memory(), true);
  else
    store_narrow(block.memory());
  stores_before_tile_loads();
  block.turn();
}

template <class Columns>
void transposed_product(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                        int64_t column, const ActRows& a, int64_t m, uint8_t* scratch, float* out,
                        int64_t out_stride) {
  turn_weights<Columns>(tiles, tile_stride, layout, column, scratch);
  const TurnedTerm term{scratch, a.data, layout.tiles()};
  turned_sum(&term, 1, transposed_columns(layout, column), 0, m, out, out_stride);
}

// The second operand of a transposed product from rows of A (kt/training.h).
void turn_rows(const uint16_t* rows, int64_t stride, const int32_t* index, int64_t m,
               int64_t columns, uint8_t* out) {
  for (int64_t first = 0; first < kTileRows; first += kLanes)
    for (int64_t c = 0; c < columns; c += kTileRows) {
      const int64_t left = columns - c;
      const __mmask32 mask = left < kTileRows ? (uint32_t{1} << left) - 1 : ~uint32_t{0};
      F x[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t r = first + i;
        x[i] = f_zero();
        if (r < m)
          x[i] = as_f(_mm512_maskz_loadu_epi16(mask, rows + (index ? index[r] : r) * stride + c));
      }
      transpose(x);
      uint8_t* to = out + c / kTileRows * kUnitBytes + first * 4;
      for (int64_t i = 0; i < kLanes; ++i) i_store(to + i * kStepBytes, as_i(x[i]));
    }
}
