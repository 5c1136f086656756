// 4-bit weights with a scale per group of columns, vector units. Activations are in fixed point
// (kernel_table.h, kInt16Group), so products are integer: codes times two digits, exact in int32
// for 32 columns (16 for kNvFp4), then multiplied by the activation's unit, a power of two, and by
// the weights' scale in float32.

// A format gives its Codes, kOffset (what codes are above the integers they stand for), kSums
// (scales per 32 columns), and is itself the scales of a block of columns:
//   Format(block, layout)
//   add(...)               the total with the products of 32 columns
//   finish(tile, total)
template <class Format> struct GroupBlock {
  template <int M>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                         const Rows<M>& rows, float* out) {
    using Codes = typename Format::Codes;
    constexpr int V = vectors_at_once(M, 2, 2), kParts = Format::kSums;
    constexpr int kSteps = 4 / kParts;
    constexpr int kAtOnce = Codes::kMaxSteps < kSteps ? Codes::kMaxSteps : kSteps;
    F total[M][kTileVectors];
    zero_rows(total);
    const int64_t blocks = layout.cols_padded() / layout.block_cols();
    const int64_t block_bytes = layout.block_bytes(), scale_bytes = layout.block_scale_bytes();
    const int64_t groups = layout.block_cols() / kActGroup;  // of the activations, per block
    const uint8_t* block = tile + layout.head_bytes();
    int64_t g = 0;
    for (int64_t b = 0; b < blocks; ++b, block += block_bytes) {
      const Format scales(block, layout);
      const uint8_t* w = block + scale_bytes;
      for (int64_t i = 0; i < groups; ++i, ++g, w += 4 * kStepBytes) {
        prefetch_steps(w, 4);
        for (int first = 0; first < kTileVectors; first += V) {
          I dots[kParts][M][V];
          for (int p = 0; p < kParts; ++p)
            for (int r = 0; r < M; ++r) {
              const int32_t* sum = a.sum + rows.id[r] * a.sums + 2 * g;
              const int32_t columns = kParts == 1 ? sum[0] + sum[1] : sum[p];
              for (I& dot : dots[p][r]) dot = i_set(-Format::kOffset * columns);
            }
          for (int p = 0; p < kParts; ++p)
            for (int s = p * kSteps; s < (p + 1) * kSteps; s += kAtOnce) {
              const uint8_t* x[M];
              for (int r = 0; r < M; ++r) x[r] = reload(rows.a[r] + g * 2 * kActGroup + s * 8);
              I acc[M][V][2];
              dot_steps<Codes, kAtOnce>(w + s * kStepBytes + first * kLanes * 4, x, acc);
              for (int r = 0; r < M; ++r)
                for (int v = 0; v < V; ++v)
                  dots[p][r][v] = i_add(dots[p][r][v], dot_total(acc[r][v][0], acc[r][v][1]));
            }
          for (int r = 0; r < M; ++r) {
            const F unit = f_set(a.scale[rows.id[r] * a.scales + g]);
            const int32_t* sum = a.sum + rows.id[r] * a.sums + 2 * g;
            for (int v = 0; v < V; ++v) {
              F& y = total[r][first + v];
              if constexpr (kParts == 1)
                y = scales.add(i, first + v, to_f(dots[0][r][v]), sum, unit, y);
              else
                y = scales.add(first + v, to_f(dots[0][r][v]), to_f(dots[1][r][v]), unit, y);
            }
          }
        }
      }
    }
    Format::finish(tile, total);
    store_rows(total, out);
  }
};

struct Int4Scales {
  using Codes = NibbleCodes;
  static constexpr int kSums = 1, kOffset = 8;
  F scale[kTileVectors];
  inline Int4Scales(const uint8_t* block, const MatrixLayout& layout) {
    for (int v = 0; v < kTileVectors; ++v) scale[v] = load_scales(block, layout.scale, v * kLanes);
  }
  inline F add(int64_t, int v, F dot, const int32_t*, F unit, F total) const {
    return f_fma(f_mul(dot, unit), scale[v], total);
  }
  template <int M> static inline void finish(const uint8_t*, F (&)[M][kTileVectors]) {}
};

// The zero point's part is taken off in float32: both terms are integers under 2^24, so this is
// the rounding of the exact difference.
struct Int4ZeroScales : Int4Scales {
  static constexpr int kOffset = 0;
  F zero[kTileVectors];
  inline Int4ZeroScales(const uint8_t* block, const MatrixLayout& layout)
      : Int4Scales(block, layout) {
    const uint8_t* zeros = block + kTileRows * layout.scale_bytes();
    for (int v = 0; v < kTileVectors; ++v) zero[v] = to_f(i_load_u8(zeros + v * kLanes));
  }
  inline F add(int64_t, int v, F dot, const int32_t* sum, F unit, F total) const {
    const F centred = f_fnma(zero[v], f_set(float(sum[0] + sum[1])), dot);
    return f_fma(f_mul(centred, unit), scale[v], total);
  }
};

struct MxFp4Scales {
  using Codes = E2m1Codes;
  static constexpr int kSums = 1, kOffset = kE2m1Offset;
  F scale[2][kTileVectors];
  inline MxFp4Scales(const uint8_t* block, const MatrixLayout&) {
    for (int part = 0; part < 2; ++part)
      for (int v = 0; v < kTileVectors; ++v)
        scale[part][v] = load_ue8m0(block + part * kTileRows + v * kLanes);
  }
  inline F add(int64_t part, int v, F dot, const int32_t*, F unit, F total) const {
    return f_fma(f_mul(dot, f_mul(unit, f_set(kE2m1Unit))), scale[part][v], total);
  }
  template <int M> static inline void finish(const uint8_t*, F (&)[M][kTileVectors]) {}
};

struct NvFp4Scales {
  using Codes = E2m1Codes;
  static constexpr int kSums = 2, kOffset = kE2m1Offset;
  alignas(64) uint16_t scale[2 * kTileRows];  // fp16
  inline NvFp4Scales(const uint8_t* block, const MatrixLayout&) {
    for (int n = 0; n < 2 * kTileRows; n += 2 * kLanes)
      i_store(scale + n, e4m3_even_fp16(i_load_u8_as_u16(block + n)));
    settle(scale);
  }
  inline F add(int v, F first, F second, F unit, F total) const {
    const F a = f_load_fp16(scale + v * kLanes), b = f_load_fp16(scale + kTileRows + v * kLanes);
    return f_fma(f_fma(second, b, f_mul(first, a)), unit, total);
  }
  template <int M> static inline void finish(const uint8_t* tile, F (&total)[M][kTileVectors]) {
    float global;
    __builtin_memcpy(&global, tile, 4);
    // kE4m3Unit * kE2m1Unit in the sum: a global scale could overflow with it.
    for (auto& row : total)
      for (F& x : row) x = f_mul(f_mul(x, f_set(kE4m3Unit * kE2m1Unit)), f_set(global));
  }
};
