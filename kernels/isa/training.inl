// The kernels that only training needs (kt/training.h).
#ifdef KT_AMX
#include "unpack_float.inl"
#include "unpack_ggml_float.inl"
#endif
#ifdef KT_WIDE
#include "transpose_avx512.inl"
#else
#include "transpose_avx2.inl"
#endif
#include "dropout.inl"
#include "outer.inl"
#include "swiglu_backward.inl"
#include "tiles_of_values.inl"
#include "transposed.inl"
#include "unpack_int_float.inl"

// By WeightFormat.
constexpr TransposedProduct kTransposed[] = {
    transposed_product<Bf16Columns>,
    transposed_product<Int8RowColumns>,
    transposed_product<Int4RowColumns>,
    transposed_product<GroupColumns<false>>,
    transposed_product<GroupColumns<true>>,
    transposed_product<Fp8BlockColumns>,
    transposed_product<Fp8RowColumns>,
    transposed_product<MxFp8Columns>,
    transposed_product<MxFp4Columns>,
    transposed_product<NvFp4Columns>,
    transposed_product<GgmlColumns<WeightFormat::kQ4_1>>,
    transposed_product<GgmlColumns<WeightFormat::kQ5_0>>,
    transposed_product<GgmlColumns<WeightFormat::kQ5_1>>,
    transposed_product<GgmlColumns<WeightFormat::kQ8_0>>,
    transposed_product<GgmlColumns<WeightFormat::kQ2K>>,
    transposed_product<GgmlColumns<WeightFormat::kQ3K>>,
    transposed_product<GgmlColumns<WeightFormat::kQ4K>>,
    transposed_product<GgmlColumns<WeightFormat::kQ5K>>,
    transposed_product<GgmlColumns<WeightFormat::kQ6K>>,
    transposed_product<GgmlColumns<WeightFormat::kIQ4NL>>,
    transposed_product<GgmlColumns<WeightFormat::kIQ4XS>>,
};
static_assert(sizeof kTransposed / sizeof *kTransposed == kFormatCount,
              "a transposed product for each format");

constexpr TrainingKernels kTraining = {
    kTransposed, swiglu_backward_tile, outer_product, gather_columns, add_tile, drop_columns,
};
