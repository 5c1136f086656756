// Integer weights with a scale per group of columns, on the vector units. Activations are in fixed
// point (kernel_table.h, kInt16Group), so products are integer: codes times two digits, exact in
// int32 for 32 columns (16 if these have two scales). The sums are multiplied in float32 by the
// activation's unit, a power of two, and by the weights' scale.

// A format is a class for the scales of a block of columns, Format(block, layout), with
//   kFormat
//   Codes         the type of its codes (codes.inl)
//   kOffset       the difference between Codes' bytes and the integers that they represent
//   kScaleBytes   at least this many bytes of scales per block
//   kSums         scales, and sums of products, per 32 columns
//   at(i, v)      what add needs for vector v of rows in the i-th 32 columns of the block
//   add(...)      the total including the products of these columns
//   finish(tile, total)
template <class Format> struct GroupBlock {
  static constexpr ActKind kAct = ActKind::kInt16Group;
  using Codes = typename Format::Codes;
  static constexpr int kSums = Format::kSums;
  static constexpr int64_t kPartBytes = Codes::kSteps * kStepBytes;  // of 32 columns

  template <int M>
  static inline void run(const uint8_t* tile, const MatrixLayout& any, const ActRows& a,
                         const Rows<M>& rows, float* out) {
    const MatrixLayout layout = any.as<Format::kFormat>();
    constexpr int V = vectors_at_once(M, 2, 2);
    F total[M][kTileVectors];
    zero_rows(total);
    const int64_t blocks = layout.cols_padded() / layout.block_cols();
    const int64_t block_bytes = layout.block_bytes(), scale_bytes = layout.block_scale_bytes();
    const int64_t groups = layout.block_cols() / kActGroup;  // of the activations, per block
    const uint8_t* block = tile + layout.head_bytes();
    int64_t g = 0;
    for (int64_t b = 0; b < blocks; ++b, block += block_bytes) {
      if constexpr (kLanes == 8) prefetch_lines(block, Format::kScaleBytes);  // no gain on AVX-512
      const Format scales(block, layout);
      const uint8_t* w = block + scale_bytes;
      for (int64_t i = 0; i < groups; ++i, ++g, w += kPartBytes) {
        prefetch_lines(w, kPartBytes);
        const uint8_t* x[M];
        for (int r = 0; r < M; ++r) x[r] = rows.a[r] + g * 2 * kActGroup;
        alignas(32) uint8_t pairs[kPairs<Codes> ? M : 1][2 * kActGroup];
        if constexpr (kPairs<Codes>)
          for (int r = 0; r < M; ++r) {
            pair_digits(x[r], pairs[r]);
            x[r] = pairs[r];
          }
        for (int first = 0; first < kTileVectors; first += V) {
          I dots[kSums][M][V];
          for (int p = 0; p < kSums; ++p)
            for (int r = 0; r < M; ++r) {
              const int32_t* sum = a.sum + rows.id[r] * a.sums + 2 * g;
              const int32_t columns = kSums == 1 ? sum[0] + sum[1] : sum[p];
              for (I& dot : dots[p][r]) dot = i_set(-Format::kOffset * columns);
            }
          add_dots<0>(w + first * kLanes * 4, x, dots);
          for (int r = 0; r < M; ++r) {
            const F unit = f_set(a.scale[rows.id[r] * a.scales + g]);
            const int32_t* sum = a.sum + rows.id[r] * a.sums + 2 * g;
            F sums[kSums];
            for (int p = 0; p < kSums; ++p)
              sums[p] = to_f(i_set(kSums == 1 ? sum[0] + sum[1] : sum[p]));
            for (int v = 0; v < V; ++v) {
              F dot[kSums];
              for (int p = 0; p < kSums; ++p) dot[p] = to_f(dots[p][r][v]);
              F& y = total[r][first + v];
              y = scales.at(i, first + v).add(dot, sums, unit, y);
            }
          }
        }
      }
    }
    Format::finish(tile, total);
    store_rows(total, out);
  }

 private:
  // Adds the products of quads [c, 8).
  template <int c, int M, int V>
  [[gnu::always_inline]] static inline void add_dots(const uint8_t* w, const uint8_t* const (&a)[M],
                                                     I (&dots)[kSums][M][V]) {
    if constexpr (c < 8) {
      constexpr int kQuads = 8 / kSums, kAtOnce = quads_at_once<Codes>(kQuads);
      const uint8_t* x[M];
      for (int r = 0; r < M; ++r) x[r] = reload(a[r]);
      I acc[M][V][2];
      zero_sums(acc);
      dot_quads<Codes, c, c + kAtOnce>(w, x, acc);
      for (int r = 0; r < M; ++r)
        for (int v = 0; v < V; ++v) {
          I& dot = dots[c / kQuads][r][v];
          dot = i_add(dot, digits_total<Codes>(acc[r][v]));
        }
      add_dots<c + kAtOnce>(w, a, dots);
    }
  }
};

// One scale for 32 columns.
struct OneScale {
  F scale;
  inline F add(const F (&dot)[1], const F (&)[1], F unit, F total) const {
    return f_fma(f_mul(dot[0], unit), scale, total);
  }
};

// One scale for the first 16 columns and one for the other 16.
struct TwoScales {
  F first, second;
  inline F add(const F (&dot)[2], const F (&)[2], F unit, F total) const {
    return f_fma(f_fma(dot[1], second, f_mul(dot[0], first)), unit, total);
  }
};

struct Int4Scales {
  static constexpr WeightFormat kFormat = WeightFormat::kInt4Group;
  using Codes = NibbleCodes;
  static constexpr int64_t kScaleBytes = 64;
  static constexpr int kSums = 1, kOffset = 8;
  F scale[kTileVectors];
  inline Int4Scales(const uint8_t* block, const MatrixLayout& layout) {
    for (int v = 0; v < kTileVectors; ++v) scale[v] = load_scales(block, layout.scale, v * kLanes);
  }
  inline OneScale at(int64_t, int v) const { return {scale[v]}; }
  template <int M> static inline void finish(const uint8_t*, F (&)[M][kTileVectors]) {}
};

// The zero point's part is subtracted in float32. Both terms are integers under 2^24, so this
// rounds the exact difference.
struct Int4ZeroScales : Int4Scales {
  static constexpr WeightFormat kFormat = WeightFormat::kInt4Zero;
  static constexpr int64_t kScaleBytes = 128;
  static constexpr int kOffset = 0;
  F zero[kTileVectors];
  inline Int4ZeroScales(const uint8_t* block, const MatrixLayout& layout)
      : Int4Scales(block, layout) {
    const uint8_t* zeros = block + kTileRows * layout.scale_bytes();
    for (int v = 0; v < kTileVectors; ++v) zero[v] = to_f(i_load_u8(zeros + v * kLanes));
  }
  struct At {
    F scale, zero;
    inline F add(const F (&dot)[1], const F (&sum)[1], F unit, F total) const {
      return f_fma(f_mul(f_fnma(zero, sum[0], dot[0]), unit), scale, total);
    }
  };
  inline At at(int64_t, int v) const { return {scale[v], zero[v]}; }
};

struct MxFp4Scales {
  static constexpr WeightFormat kFormat = WeightFormat::kMxFp4;
  using Codes = E2m1Codes;
  static constexpr int64_t kScaleBytes = 64;
  static constexpr int kSums = 1, kOffset = kE2m1Offset;
  F scale[2][kTileVectors];
  inline MxFp4Scales(const uint8_t* block, const MatrixLayout&) {
    for (int part = 0; part < 2; ++part)
      for (int v = 0; v < kTileVectors; ++v)
        scale[part][v] = load_ue8m0(block + part * kTileRows + v * kLanes);
  }
  struct At {
    F scale;
    inline F add(const F (&dot)[1], const F (&)[1], F unit, F total) const {
      return f_fma(f_mul(dot[0], f_mul(unit, f_set(kE2m1Unit))), scale, total);
    }
  };
  inline At at(int64_t i, int v) const { return {scale[i][v]}; }
  template <int M> static inline void finish(const uint8_t*, F (&)[M][kTileVectors]) {}
};

struct NvFp4Scales {
  static constexpr WeightFormat kFormat = WeightFormat::kNvFp4;
  using Codes = E2m1Codes;
  static constexpr int64_t kScaleBytes = 64;
  static constexpr int kSums = 2, kOffset = kE2m1Offset;
  alignas(64) uint16_t scale[2 * kTileRows];  // fp16
  inline NvFp4Scales(const uint8_t* block, const MatrixLayout&) {
    for (int n = 0; n < 2 * kTileRows; n += 2 * kLanes)
      i_store(scale + n, e4m3_even_fp16(i_load_u8_as_u16(block + n)));
    settle(scale);
  }
  inline TwoScales at(int64_t, int v) const {
    return {f_load_fp16(scale + v * kLanes), f_load_fp16(scale + kTileRows + v * kLanes)};
  }
  template <int M> static inline void finish(const uint8_t* tile, F (&total)[M][kTileVectors]) {
    float global;
    __builtin_memcpy(&global, tile, 4);
    // kE4m3Unit * kE2m1Unit is applied to the sum, because a global scale could overflow with it.
    for (auto& row : total)
      for (F& x : row) x = f_mul(f_mul(x, f_set(kE4m3Unit * kE2m1Unit)), f_set(global));
  }
};
