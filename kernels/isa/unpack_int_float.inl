// Packed integer weights with a scale per row as float32 (unpack_float.inl).
struct Int8RowColumns {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    const uint8_t* p = tile + layout.head_bytes() + k / 4 * kStepBytes;
    for (int64_t c = 0; c < columns; c += 4, p += kStepBytes, w += 4 * kTileRows)
      for (int v = 0; v < kTileVectors; ++v) {
        const F scale = f_load(reinterpret_cast<const float*>(tile) + v * kLanes);
        F x[4];
        byte_values<true>(i_load(p + v * kLanes * 4), x);
        for (int i = 0; i < 4; ++i) store_column(w, i, v, f_mul(x[i], scale));
      }
  }
};

struct Int4RowColumns {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    F scale[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v)
      scale[v] = f_load(reinterpret_cast<const float*>(tile) + v * kLanes);
    unpack_nibble_steps(
        tile + layout.head_bytes() + k / 8 * kStepBytes, columns, nibble_table(kInt4Values),
        [&](F x, int v) { return f_mul(x, scale[v]); }, w);
  }
};
