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

// A^T for 32 rows of A is what the tile unit takes.
struct TurnedUnits : PackedUnits<false> {
  void prepare(int64_t) const {}
  void finish(const ActRows&, int64_t, float*) const {}
};

// 32 columns of the result, [column][32 rows], to m rows of 32.
inline void turn_back(const float* columns, int64_t m, float* out) {
  for (int64_t r = 0; r < m; r += kLanes)
    for (int64_t c = 0; c < kTileRows; c += kLanes) {
      F x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = f_load(columns + (c + i) * kTileRows + r);
      transpose(x);
      for (int i = 0; i < kLanes; ++i) f_store(out + (r + i) * kTileRows + c, x[i]);
    }
}

template <class Columns>
void transposed_product(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                        int64_t column, const ActRows& a, int64_t m, uint8_t* scratch, float* out,
                        int64_t out_stride) {
  constexpr int64_t kAhead = 2;  // tiles whose weights are on their way
  const int64_t columns = transposed_columns(layout, column), n = layout.tiles();
  const int64_t stride = n * kBlockBytes;  // from 16 rows of W^T to the next
  const auto fetch = [&](int64_t first, int64_t count) {
    tiles_ahead(tiles, tile_stride, layout, column, columns, first, count).fetch(0, 1);
  };
  fetch(0, kAhead);
  for (int64_t t = 0; t < n; ++t) {
    fetch(t + kAhead, 1);
    TurnedTile<Columns>::unpack(tiles + t * tile_stride, layout, column, columns,
                                scratch + t * kBlockBytes, stride);
  }
  stores_before_tile_loads();
  const ActRows weights{scratch, stride / kBlockRows, nullptr, nullptr, 0, 0, nullptr};
  alignas(64) float result[(kTransposedColumns + kTileRows) * kTileRows];
  for (int64_t r = 0; r < m; r += kTileRows) {
    TurnedUnits units{{a.data + r * a.stride}};
    multiply_rows(units, n, weights, columns, result);
    for (int64_t c = 0; c < columns; c += kTileRows)
      turn_back(result + c * kTileRows, m - r < kTileRows ? m - r : kTileRows,
                out + c / kTileRows * out_stride + r * kTileRows);
  }
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
