// AMX tiles. A block of 16 or 32 activation rows by the 32 weight rows of a packed tile: 1x2 or
// 2x2 accumulators (tiles 0-3), A in tiles 4 and 5, B in tiles 6 and 7. A step of the packed
// layout is exactly one row of both B tiles. Rows past m are computed on slack and not used.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Not a local: GCC 12 takes the load to read 8 bytes only, and leaves out the stores of a local's others.
constexpr TileConfig kTileConfig;
void tiles_begin() { _tile_loadconfig(&kTileConfig); }
void tiles_end() { _tile_release(); }

constexpr int64_t kTileStepRows = 16;  // steps per AMX B tile: 32 k of bf16, 64 k of int8
constexpr int64_t kBlockBytes = kBlockRows * kChunkBytes;  // an AMX A tile

#define KT_TILE_LOOP(DOT, TWO)                                                   \
  for (int64_t s = 0; s < blocks; ++s) {                                         \
    _tile_loadd(4, rows + s * kBlockBytes, kChunkBytes);                         \
    _tile_loadd(6, weights + s * kTileStepRows * kStepBytes, kStepBytes);        \
    DOT(0, 4, 6);                                                                \
    _tile_loadd(7, weights + s * kTileStepRows * kStepBytes + 64, kStepBytes);   \
    DOT(1, 4, 7);                                                                \
    if constexpr (TWO) {                                                         \
      _tile_loadd(5, rows + kBlockRows * stride + s * kBlockBytes, kChunkBytes); \
      DOT(2, 5, 6);                                                              \
      DOT(3, 5, 7);                                                              \
    }                                                                            \
  }

// Adds the products of 16 (or, with `two`, 32) rows to the accumulators in out[row * 32 + n], 4
// bytes each; with `fresh` they start at zero.
template <bool integer, bool two>
inline void tile_block(const uint8_t* weights, int64_t blocks, const uint8_t* rows, int64_t stride,
                       bool fresh, void* out) {
  auto* c = static_cast<uint8_t*>(out);
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (two) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, c, kStepBytes);
    _tile_loadd(1, c + 64, kStepBytes);
    if constexpr (two) {
      _tile_loadd(2, c + 16 * kStepBytes, kStepBytes);
      _tile_loadd(3, c + 16 * kStepBytes + 64, kStepBytes);
    }
  }
  if constexpr (integer) {
    KT_TILE_LOOP(_tile_dpbssd, two)
  } else {
    KT_TILE_LOOP(_tile_dpbf16ps, two)
  }
  _tile_stored(0, c, kStepBytes);
  _tile_stored(1, c + 64, kStepBytes);
  if constexpr (two) {
    _tile_stored(2, c + 16 * kStepBytes, kStepBytes);
    _tile_stored(3, c + 16 * kStepBytes + 64, kStepBytes);
  }
}
#undef KT_TILE_LOOP

// All m rows by `steps` packed steps, the first of which is step `first` of the A rows.
template <bool integer>
inline void tile_rows(const uint8_t* weights, int64_t steps, const ActRows& a, int64_t first,
                      int64_t m, bool fresh, float* out) {
  const int64_t blocks = steps / kTileStepRows;
  for (int64_t r = 0; r < m; r += 32) {
    const uint8_t* rows = a.data + r * a.stride + first / kTileStepRows * kBlockBytes;
    float* c = out + r * kTileRows;
    if (m - r > 16)
      tile_block<integer, true>(weights, blocks, rows, a.stride, fresh, c);
    else
      tile_block<integer, false>(weights, blocks, rows, a.stride, fresh, c);
  }
}

// int32 accumulators to floats, in place.
inline void dequantise_rows(const uint8_t* tile, const ActRows& a, int64_t m, float* out) {
  const auto* scale = reinterpret_cast<const float*>(tile);
  for (int64_t r = 0; r < m; ++r)
    for (int n = 0; n < kTileRows; n += kLanes) {
      float* x = out + r * kTileRows + n;
      f_store(x, dequantise(i_load(x), f_load(scale + n), a.scale[r]));
    }
}

void tile_product_bf16(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                       float* out) {
  tile_rows<false>(tile, layout.cols_padded() / 2, a, 0, m, true, out);
}

void tile_product_int8(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                       float* out) {
  tile_rows<true>(tile + layout.head_bytes(), layout.cols_padded() / 4, a, 0, m, true, out);
  dequantise_rows(tile, a, m, out);
}

// INT4: a stretch of columns is unpacked to int8 steps on the stack (in the first-level cache),
// used for all rows, and the accumulators go through `out` from one stretch to the next.
void tile_product_int4(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a, int64_t m,
                       float* out) {
  constexpr int64_t kStretch = 512;  // columns: 16 KB of int8
  alignas(64) uint8_t unpacked[kStretch / 4 * kStepBytes];
  const I mask = i_set(0x0f0f0f0f), eight = i_set(0x08080808);
  const uint8_t* packed = tile + layout.head_bytes();
  for (int64_t k = 0; k < layout.cols_padded(); k += kStretch) {
    const int64_t columns =
        layout.cols_padded() - k < kStretch ? layout.cols_padded() - k : kStretch;
    uint8_t* dst = unpacked;
    for (int64_t s = 0; s < columns / 8; ++s, packed += kStepBytes, dst += 2 * kStepBytes)
      for (int n = 0; n < kTileRows * 4; n += kLanes * 4) {
        const I both = i_load(packed + n);
        i_store(dst + n, i_sub8(i_and(both, mask), eight));
        i_store(dst + kStepBytes + n, i_sub8(i_and(i_srl<4>(both), mask), eight));
      }
    tile_rows<true>(unpacked, columns / 4, a, k / 4, m, k == 0, out);
  }
  dequantise_rows(tile, a, m, out);
}
