// The kernels of the weight formats: one row per format, in the order of WeightFormat.

template <class Block>
constexpr ProductKernel vector_kernel{Block::kAct, false, vector_product<Block>};

// KT_GEMM(Units, kernel) is the tile kernel of Units with AMX, and `kernel` elsewhere. The unused
// one is not even named, so it is not compiled.
#ifdef KT_AMX
template <class Units>
constexpr ProductKernel tile_kernel{Units::kInteger ? ActKind::kInt8Row : ActKind::kBF16, true,
                                    tile_product<Units>};
#define KT_GEMM(Units, ...) tile_kernel<Units>
#else
// BF16 weights are multiplied as float32 even if dpbf16 exists: on Intel it has half the rate of
// two FMAs.
template <class Columns>
constexpr ProductKernel float_kernel{ActKind::kFloat, false, gemm_float<Columns>};
// With dpbusd, integer weights with a scale per group are fastest as integers, and GEMV kernels do
// not wait for memory once a tile is in the cache. Without it, float32 FMA is as fast.
#ifdef KT_VNNI
template <class Scales, class>
constexpr ProductKernel group_kernel = vector_kernel<GroupBlock<Scales>>;
#else
template <class, class Columns> constexpr ProductKernel group_kernel = float_kernel<Columns>;
#endif
#define KT_GEMM(Units, ...) __VA_ARGS__
#endif

// Rows per expert from which GEMM is used if the kind is not fixed: where GEMM starts to cost no
// more than GEMV, measured on one core with weights from memory. avx512_bf16 uses `vnni`.
struct MinRows {
  int amx, vnni, avx512, avx2;
};
constexpr int min_rows(const MinRows& measured) {
#if defined(KT_AMX)
  return measured.amx;
#elif defined(KT_VNNI)
  return measured.vnni;
#elif defined(KT_WIDE)
  return measured.avx512;
#else
  return measured.avx2;
#endif
}

// The format comes from Scales, for which the GEMV kernel is compiled, so the two cannot differ.
template <class Scales>
constexpr FormatKernels group_row(const ProductKernel& gemm, const MinRows& measured) {
  return {.format = Scales::kFormat,
          .gemv = vector_kernel<GroupBlock<Scales>>,
          .gemm = gemm,
          .gemm_min_rows = min_rows(measured)};
}

template <WeightFormat kFormat> constexpr FormatKernels ggml_row(const MinRows& measured) {
  static_assert(is_ggml(kFormat));
  using Scales = GgmlScales<kFormat>;
  return group_row<Scales>(KT_GEMM(GgmlUnits<kFormat>, group_kernel<Scales, GgmlColumns<kFormat>>),
                           measured);
}

constexpr FormatKernels kFormatKernels[] = {
    {.format = WeightFormat::kBF16,
     .gemv = vector_kernel<Bf16Block>,
     .gemm = KT_GEMM(Bf16Units, float_kernel<Bf16Columns>),
     .gemm_min_rows = min_rows({.amx = 4, .vnni = 5, .avx512 = 5, .avx2 = 5})},
    {.format = WeightFormat::kInt8Row,
     .gemv = vector_kernel<Int8Block>,
     .gemm = KT_GEMM(Int8Units, {ActKind::kInt8Row, false, gemm_int8_row}),
     .gemm_min_rows = min_rows({.amx = 6, .vnni = 16, .avx512 = 9, .avx2 = 9})},
    {.format = WeightFormat::kInt4Row,
     .gemv = vector_kernel<Int4RowBlock>,
     .gemm = KT_GEMM(Int4RowUnits, {ActKind::kInt8Row, false, gemm_int4_row}),
     .gemm_min_rows = min_rows({.amx = 7, .vnni = 12, .avx512 = 16, .avx2 = 2})},
    group_row<Int4Scales>(
        KT_GEMM(Int4GroupUnits<false>, group_kernel<Int4Scales, GroupColumns<false>>),
        {.amx = 8, .vnni = 5, .avx512 = 16, .avx2 = 64}),
    group_row<Int4ZeroScales>(
        KT_GEMM(Int4GroupUnits<true>, group_kernel<Int4ZeroScales, GroupColumns<true>>),
        {.amx = 8, .vnni = 5, .avx512 = 16, .avx2 = 64}),
    {.format = WeightFormat::kFp8Block,
     .gemv = vector_kernel<Fp8BlockBlock>,
     .gemm = KT_GEMM(Fp8Units<false>, float_kernel<Fp8BlockColumns>),
     .gemm_min_rows = min_rows({.amx = 4, .vnni = 9, .avx512 = 9, .avx2 = 8})},
    {.format = WeightFormat::kFp8Row,
     .gemv = vector_kernel<Fp8RowBlock>,
     .gemm = KT_GEMM(Fp8Units<true>, float_kernel<Fp8RowColumns>),
     .gemm_min_rows = min_rows({.amx = 4, .vnni = 9, .avx512 = 9, .avx2 = 8})},
    {.format = WeightFormat::kMxFp8,
     .gemv = vector_kernel<MxFp8Block>,
     .gemm = KT_GEMM(MxFp8Units, float_kernel<MxFp8Columns>),
     .gemm_min_rows = min_rows({.amx = 4, .vnni = 9, .avx512 = 5, .avx2 = 8})},
    group_row<MxFp4Scales>(KT_GEMM(MxFp4Units, group_kernel<MxFp4Scales, MxFp4Columns>),
                           {.amx = 5, .vnni = 5, .avx512 = 12, .avx2 = 12}),
    group_row<NvFp4Scales>(KT_GEMM(NvFp4Units, float_kernel<NvFp4Columns>),
                           {.amx = 5, .vnni = 12, .avx512 = 5, .avx2 = 5}),
    ggml_row<WeightFormat::kQ4_1>({.amx = 9, .vnni = 5, .avx512 = 24, .avx2 = 64}),
    ggml_row<WeightFormat::kQ5_0>({.amx = 9, .vnni = 5, .avx512 = 20, .avx2 = 40}),
    ggml_row<WeightFormat::kQ5_1>({.amx = 7, .vnni = 5, .avx512 = 16, .avx2 = 24}),
    ggml_row<WeightFormat::kQ8_0>({.amx = 9, .vnni = 5, .avx512 = 13, .avx2 = 64}),
    ggml_row<WeightFormat::kQ2K>({.amx = 9, .vnni = 5, .avx512 = 20, .avx2 = 24}),
    ggml_row<WeightFormat::kQ3K>({.amx = 7, .vnni = 5, .avx512 = 20, .avx2 = 24}),
    ggml_row<WeightFormat::kQ4K>({.amx = 9, .vnni = 5, .avx512 = 24, .avx2 = 64}),
    ggml_row<WeightFormat::kQ5K>({.amx = 9, .vnni = 5, .avx512 = 24, .avx2 = 28}),
    ggml_row<WeightFormat::kQ6K>({.amx = 8, .vnni = 5, .avx512 = 14, .avx2 = 16}),
    ggml_row<WeightFormat::kIQ4NL>({.amx = 8, .vnni = 5, .avx512 = 14, .avx2 = 48}),
    ggml_row<WeightFormat::kIQ4XS>({.amx = 8, .vnni = 5, .avx512 = 20, .avx2 = 48}),
};
static_assert(sizeof kFormatKernels / sizeof *kFormatKernels == kFormatCount,
              "one row of kernels per format");
constexpr bool sound_rows() {
  for (int i = 0; i < kFormatCount; ++i) {
    const FormatKernels& row = kFormatKernels[i];
    if (int(row.format) != i || row.gemm_min_rows < 1) return false;
  }
  return true;
}
static_assert(sound_rows(), "rows of kernels in the order of WeightFormat, with their min_rows");
