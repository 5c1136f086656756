// Packed weights as float32, including scales. Format::unpack(tile, layout, k, columns, w) writes
// w[column][32] of the stretch of columns that begins at k. Stretches begin at multiples of 64 and
// have a multiple of 32 columns, at most 128. Exact wherever the product of value and scale is
// exact.
constexpr int64_t kFloatStretch = 128;              // 16 KB
static_assert(kFp8BlockSize % kFloatStretch == 0);  // one scale per stretch

inline void store_column(float* w, int column, int v, F x) {
  f_store(w + column * kTileRows + v * kLanes, x);
}

struct Bf16Columns {
  static void unpack(const uint8_t* tile, const MatrixLayout&, int64_t k, int64_t columns,
                     float* w) {
    const I upper = i_set(int32_t(0xffff0000));
    const uint8_t* p = tile + k / 2 * kStepBytes;
    for (int64_t c = 0; c < columns; c += 2, p += kStepBytes, w += 2 * kTileRows)
      for (int v = 0; v < kTileVectors; ++v) {
        const I step = i_load(p + v * kLanes * 4);
        store_column(w, 0, v, as_f(i_sll<16>(step)));
        store_column(w, 1, v, as_f(i_and(step, upper)));
      }
  }
};

// e4m3 with its exponent and mantissa in bits 20 to 26, the exponent's bias corrected to float32's
// (+ 120 << 23), and its sign in bit 31 of `sign`. The corrected value x is right for normal
// numbers. Below 2^-6, where the mantissa has no implicit 1, 2 x - 2^-6 is right, and only there is
// it the smaller of the two.
inline F e4m3_times(I biased, I sign, F scale) {
  const F x = as_f(biased);
  const F magnitude = f_min(f_fma(x, f_set(2), f_set(-0x1p-6f)), x);
  return as_f(i_xor(as_i(f_mul(magnitude, scale)), i_and(sign, i_set(int32_t(0x80000000)))));
}

inline void unpack_e4m3(const uint8_t* p, int64_t columns, const F (&scale)[kTileVectors],
                        float* w) {
  // Two columns at a time, in the halves of a lane.
  const I bits = i_set(0x07f007f0), bias = i_set(0x3c003c00), upper = i_set(int32_t(0xffff0000));
  for (int64_t c = 0; c < columns; c += 4, p += kStepBytes, w += 4 * kTileRows)
    for (int v = 0; v < kTileVectors; ++v) {
      const I step = i_load(p + v * kLanes * 4);
      const I even = i_add(i_and(i_sll<4>(step), bits), bias);
      const I odd = i_add(i_and(i_srl<4>(step), bits), bias);
      store_column(w, 0, v, e4m3_times(i_sll<16>(even), i_sll<24>(step), scale[v]));
      store_column(w, 1, v, e4m3_times(i_and(even, upper), i_sll<8>(step), scale[v]));
      store_column(w, 2, v, e4m3_times(i_sll<16>(odd), i_sll<16>(step), scale[v]));
      store_column(w, 3, v, e4m3_times(i_and(odd, upper), step, scale[v]));
    }
}

struct Fp8BlockColumns {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    F scale[kTileVectors];
    for (F& x : scale) x = f_set(reinterpret_cast<const float*>(tile)[k / kFp8BlockSize]);
    unpack_e4m3(tile + layout.head_bytes() + k / 4 * kStepBytes, columns, scale, w);
  }
};

struct Fp8RowColumns {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    F scale[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v)
      scale[v] = f_load(reinterpret_cast<const float*>(tile) + v * kLanes);
    unpack_e4m3(tile + layout.head_bytes() + k / 4 * kStepBytes, columns, scale, w);
  }
};

struct MxFp8Columns {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    const uint8_t* block = tile + k / 64 * layout.block_bytes();
    for (int64_t c = 0; c < columns; c += 64, block += layout.block_bytes())
      for (int half = 0; half < 2; ++half, w += 32 * kTileRows) {
        F scale[kTileVectors];
        for (int v = 0; v < kTileVectors; ++v)
          scale[v] = load_ue8m0(block + half * 32 + v * kLanes);
        unpack_e4m3(block + 64 + half * 8 * kStepBytes, 32, scale, w);
      }
  }
};

// 4-bit steps. weight(value, v) is the weight for a code's value in vector v.
template <class Weight>
inline void unpack_nibble_steps(const uint8_t* p, int64_t columns, NibbleTable table,
                                const Weight& weight, float* w) {
  for (int64_t c = 0; c < columns; c += 8, p += kStepBytes, w += 8 * kTileRows)
    for (int v = 0; v < kTileVectors; ++v) {
      F x[8];
      nibble_values(i_load(p + v * kLanes * 4), table, x);
      for (int i = 0; i < 8; ++i) store_column(w, i, v, weight(x[i], v));
    }
}

template <bool has_zero> struct GroupColumns {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    const NibbleTable table = nibble_table(has_zero ? kUnsignedValues : kInt4Values);
    const uint8_t* group = tile + k / layout.group * layout.block_bytes();
    int64_t in_group = k % layout.group;
    for (int64_t c = 0; c < columns; c += 32, w += 32 * kTileRows) {
      F scale[kTileVectors], minus_zero[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) {
        scale[v] = load_scales(group, layout.scale, v * kLanes);
        if constexpr (has_zero) {
          const uint8_t* zeros = group + kTileRows * layout.scale_bytes();
          minus_zero[v] = to_f(i_sub(i_zero(), i_load_u8(zeros + v * kLanes)));
        }
      }
      const uint8_t* p = group + layout.block_scale_bytes() + in_group / 8 * kStepBytes;
      unpack_nibble_steps(
          p, 32, table,
          [&](F x, int v) {
            if constexpr (has_zero) x = f_add(x, minus_zero[v]);
            return f_mul(x, scale[v]);
          },
          w);
      in_group += 32;
      if (in_group == layout.group) group += layout.block_bytes(), in_group = 0;
    }
  }
};

struct MxFp4Columns {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    const NibbleTable table = nibble_table(kTwiceE2m1);
    const uint8_t* block = tile + k / 64 * layout.block_bytes();
    for (int64_t c = 0; c < columns; c += 64, block += layout.block_bytes())
      for (int half = 0; half < 2; ++half, w += 32 * kTileRows) {
        F scale[kTileVectors];
        for (int v = 0; v < kTileVectors; ++v)
          scale[v] = f_mul(load_ue8m0(block + half * 32 + v * kLanes), f_set(0.5f));
        unpack_nibble_steps(
            block + 64 + half * 4 * kStepBytes, 32, table,
            [&](F x, int v) { return f_mul(x, scale[v]); }, w);
      }
  }
};

struct NvFp4Columns {
  static void unpack(const uint8_t* tile, const MatrixLayout& layout, int64_t k, int64_t columns,
                     float* w) {
    const NibbleTable table = nibble_table(kTwiceE2m1);
    const F global = f_set(*reinterpret_cast<const float*>(tile) * 0.5f);
    const I bias = i_set(0x3c000000);
    const uint8_t* block = tile + layout.head_bytes() + k / 32 * layout.block_bytes();
    for (int64_t c = 0; c < columns; c += 32, block += layout.block_bytes())
      for (int half = 0; half < 2; ++half, w += 16 * kTileRows) {
        F scale[kTileVectors];
        for (int v = 0; v < kTileVectors; ++v) {
          const I code = i_load_u8(block + half * 32 + v * kLanes);
          scale[v] = e4m3_times(i_add(i_sll<20>(code), bias), i_zero(), global);
        }
        unpack_nibble_steps(
            block + 64 + half * 2 * kStepBytes, 16, table,
            [&](F x, int v) { return f_mul(x, scale[v]); }, w);
      }
  }
};
