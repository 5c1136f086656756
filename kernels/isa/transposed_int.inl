// Products with the transpose of weights that are small integers times a scale (kt/training.h), on
// the vector units. A value of A times the scale of its row of W becomes a 16-bit integer, with one
// unit for all values of a row of A in a stretch: more exact than the bf16 that A was rounded to.
// Products of pairs of 16-bit integers are twice as many an instruction as those of float32.

// Tiles of W in a stretch. Pairs of its rows take 16 KB, half of a first-level cache; sums of codes
// up to 128 stay in int32.
constexpr int64_t kIntTiles = 4, kIntRows = kIntTiles * kTileRows;
static_assert(kIntRows * 128 * int64_t{32639} < int64_t{1} << 31);
constexpr int kPairColumns = int(kTransposedColumns);

// What a kernel needs of a format: Codes(tile, layout),
//   quads(column, v, x)   of vector v of rows, 32 columns as signed bytes, four in a lane of x[i]
//   scale(column, v)      of vector v of rows, the same for span() columns
struct Int8RowCodes {
  const uint8_t* tile;
  const MatrixLayout& layout;
  static int64_t span(const MatrixLayout&) { return kTransposedColumns; }
  void quads(int64_t column, int v, I* x) const {
    const uint8_t* p = tile + layout.head_bytes() + column / 4 * kStepBytes + v * kLanes * 4;
    for (int i = 0; i < 8; ++i) x[i] = i_load(p + i * kStepBytes);
  }
  F scale(int64_t, int v) const {
    return f_load(reinterpret_cast<const float*>(tile) + v * kLanes);
  }
};

// Four steps of 4-bit codes, whose values a table has.
inline void nibble_quads(const uint8_t* steps, int v, const int8_t* values, I* x) {
  const I mask = i_set(0x0f0f0f0f);
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  for (int i = 0; i < 8; i += 2) {
    const I step = i_load(steps + i / 2 * kStepBytes + v * kLanes * 4);
    x[i] = i_lookup(table, i_and(step, mask));
    x[i + 1] = i_lookup(table, i_and(i_srl<4>(step), mask));
  }
}

struct Int4RowCodes {
  const uint8_t* tile;
  const MatrixLayout& layout;
  static int64_t span(const MatrixLayout&) { return kTransposedColumns; }
  void quads(int64_t column, int v, I* x) const {
    nibble_quads(tile + layout.head_bytes() + column / 8 * kStepBytes, v, kInt4Values, x);
  }
  F scale(int64_t, int v) const {
    return f_load(reinterpret_cast<const float*>(tile) + v * kLanes);
  }
};

template <bool has_zero> struct GroupCodes {
  const uint8_t* tile;
  const MatrixLayout& layout;
  // The columns of a group that begin at a multiple of 64: all 64, or 32 of each.
  static int64_t span(const MatrixLayout& layout) {
    return layout.group % kTransposedColumns ? kTileRows : kTransposedColumns;
  }
  void quads(int64_t column, int v, I* x) const {
    const uint8_t* block = group(column);
    const uint8_t* steps =
        block + layout.block_scale_bytes() + column % layout.group / 8 * kStepBytes;
    nibble_quads(steps, v, has_zero ? kUnsignedValues : kInt4Values, x);
    if constexpr (has_zero) {
      I zero = i_load_u8(block + kTileRows * layout.scale_bytes() + v * kLanes);
      zero = i_or(zero, i_sll<8>(zero));
      zero = i_or(zero, i_sll<16>(zero));
      for (int i = 0; i < 8; ++i) x[i] = i_sub8(x[i], zero);
    }
  }
  F scale(int64_t column, int v) const {
    return load_scales(group(column), layout.scale, v * kLanes);
  }

 private:
  const uint8_t* group(int64_t column) const {
    return tile + column / layout.group * layout.block_bytes();
  }
};

struct MxFp4Codes {
  const uint8_t* tile;
  const MatrixLayout& layout;
  static int64_t span(const MatrixLayout&) { return kTileRows; }
  void quads(int64_t column, int v, I* x) const {
    nibble_quads(block(column) + 64 + column / 32 % 2 * 4 * kStepBytes, v, kTwiceE2m1, x);
  }
  F scale(int64_t column, int v) const {
    return f_mul(load_ue8m0(block(column) + column / 32 % 2 * 32 + v * kLanes), f_set(0.5f));
  }

 private:
  const uint8_t* block(int64_t column) const { return tile + column / 64 * layout.block_bytes(); }
};

// The codes of a tile's columns to w[16][64]: those of rows 2 i and 2 i + 1 in a lane of w[i].
template <class Codes>
inline void unpack_pairs(const Codes& codes, int64_t column, int64_t columns, int32_t* w) {
  constexpr int kAtOnce = 4 * kLanes;
  for (int v = 0; v < kTileVectors; ++v)
    for (int64_t c = 0; c < columns; c += kAtOnce) {
      I quads[kLanes];
      for (int i = 0; i < kLanes; i += 8)
        if (c + 4 * i < columns)
          codes.quads(column + c + 4 * i, v, quads + i);
        else
          for (int j = 0; j < 8; ++j) quads[i + j] = i_zero();
      F rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = as_f(quads[i]);
      transpose(rows);
      for (int i = 0; i < kLanes; i += 2) {
        I pairs[4];
        byte_pairs(as_i(rows[i]), as_i(rows[i + 1]), pairs);
        for (int j = 0; j < 4; ++j)
          i_store(w + (v * kLanes + i) / 2 * kPairColumns + c + j * kLanes, pairs[j]);
      }
    }
}

// n values times their scales to 16-bit integers; returns their unit, NaN where a value is not
// finite.
inline float quantise_scaled(const float* x, const float* scale, int64_t n, int16_t* to) {
  alignas(64) float scaled[kIntRows];
  I most = i_zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const F y = f_mul(f_load(x + i), f_load(scale + i));
    f_store(scaled + i, y);
    most = i_max(most, i_and(as_i(y), i_set(0x7fffffff)));
  }
  const float unit = int16_scale(absmax_lanes(most));
  const F inverse = f_set(unit == unit ? 1.0f / unit : 0.0f);
  for (int64_t i = 0; i < n; i += 2 * kLanes)
    i_store_i16(to + i, round_i(f_mul(f_load(scaled + i), inverse)),
                round_i(f_mul(f_load(scaled + i + kLanes), inverse)));
  return unit;
}

struct PairBlock {
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 6;

  const int32_t* w;  // [rows / 2][64]
  int64_t rows;      // of W
  int64_t columns, span;
  const float* scale;  // [span][kIntRows]
  const ActRows& a;
  int64_t first_row;
  float* out;
  int64_t out_stride;
  AheadTiles ahead;

  template <int M> void run(int64_t first, int64_t part, int64_t parts) const {
    constexpr int V = kLanes == 8 && M <= 3 ? 4 : 2;
    const Rows<M> at = rows_at<M>(a, first);
    alignas(64) int32_t pairs[M][kIntRows / 2];
    F unit[M];
    ahead.fetch(part, parts);
    if (part + 1 < parts) prefetch_rows(a, first + M, M, first_row * 4, rows * 4);
    for (int64_t begin = 0; begin < columns; begin += span) {
      for (int r = 0; r < M; ++r) {
        const auto* x = reinterpret_cast<const float*>(at.a[r]) + first_row;
        unit[r] = f_set(quantise_scaled(x, scale + begin / span * kIntRows, rows,
                                        reinterpret_cast<int16_t*>(pairs[r])));
      }
      const int64_t end = begin + span < columns ? begin + span : columns;
      for (int64_t column = begin; column < end; column += V * kLanes) {
        I acc[M][V];
        for (auto& row : acc)
          for (I& x : row) x = i_zero();
        for (int64_t i = 0; i < rows / 2; ++i) {
          I weight[V];
          for (int v = 0; v < V; ++v)
            weight[v] = i_load(w + i * kPairColumns + column + v * kLanes);
          for (int r = 0; r < M; ++r) {
            const I value = i_set(pairs[r][i]);
            for (int v = 0; v < V; ++v) acc[r][v] = dot_pairs(acc[r][v], weight[v], value);
          }
        }
        float* y = out + column / kTileRows * out_stride + first * kTileRows + column % kTileRows;
        for (int r = 0; r < M; ++r)
          for (int v = 0; v < V; ++v) {
            float* sum = y + r * kTileRows + v * kLanes;
            const F before = first_row == 0 ? f_zero() : f_load(sum);
            f_store(sum, f_fma(to_f(acc[r][v]), unit[r], before));
          }
      }
    }
  }
};

template <class Codes>
void transposed_integers(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                         int64_t column, const ActRows& a, int64_t m, uint8_t*, float* out,
                         int64_t out_stride) {
  alignas(64) int32_t w[kIntRows / 2 * kPairColumns];
  alignas(64) float scale[kTransposedColumns / kTileRows][kIntRows];
  const int64_t columns = transposed_columns(layout, column), n = layout.tiles();
  const int64_t span = Codes::span(layout);
  for (int64_t t = 0; t < n; t += kIntTiles) {
    const int64_t count = t + kIntTiles < n ? kIntTiles : n - t;
    for (int64_t i = 0; i < count; ++i) {
      const Codes codes{tiles + (t + i) * tile_stride, layout};
      unpack_pairs(codes, column, columns, w + i * kTileRows / 2 * kPairColumns);
      for (int64_t c = 0; c < columns; c += span)
        for (int v = 0; v < kTileVectors; ++v)
          f_store(scale[c / span] + i * kTileRows + v * kLanes, codes.scale(column + c, v));
    }
    row_blocks(
        PairBlock{
            w, count * kTileRows, columns, span, scale[0], a, t * kTileRows, out, out_stride,
            tiles_ahead(tiles, tile_stride, layout, column, columns, t + kIntTiles, kIntTiles)},
        m);
  }
}
