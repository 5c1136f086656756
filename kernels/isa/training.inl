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

// The kernel for weights that are integers times a scale. With tiles bf16 is as fast as two digits
// of int8 would be.
#ifdef KT_AMX
#include "unpack_int_float.inl"
#define KT_INTEGERS(Columns, Codes) transposed_product<Columns>
#else
#include "transposed_int.inl"
#define KT_INTEGERS(Columns, Codes) transposed_integers<Codes>
#endif

// By WeightFormat.
constexpr TransposedProduct kTransposed[] = {
    transposed_product<Bf16Columns>,
    KT_INTEGERS(Int8RowColumns, Int8RowCodes),
    KT_INTEGERS(Int4RowColumns, Int4RowCodes),
    KT_INTEGERS(GroupColumns<false>, GroupCodes<false>),
    KT_INTEGERS(GroupColumns<true>, GroupCodes<true>),
    transposed_product<Fp8BlockColumns>,
    transposed_product<Fp8RowColumns>,
    transposed_product<MxFp8Columns>,
    KT_INTEGERS(MxFp4Columns, MxFp4Codes),
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

#ifdef KT_AMX
constexpr auto kTurnRows = turn_rows;
#else
constexpr decltype(TrainingKernels::turn_rows) kTurnRows = nullptr;
#endif

constexpr TrainingKernels kTraining = {
    kTransposed, kTurnRows, swiglu_backward_tile, outer_product, gather_columns,
    add_tile,    keep_tile, drop_columns,
};
