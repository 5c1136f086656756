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

#ifdef KT_AMX
#include "unpack_int_float.inl"
#else
#include "transposed_int.inl"
#endif

// By WeightFormat: C(columns), or N(columns, codes) for integers times a scale.
#define KT_EACH_FORMAT(C, N)                                                                     \
  C(Bf16Columns), N(Int8RowColumns, Int8RowCodes), N(Int4RowColumns, Int4RowCodes),              \
      N(GroupColumns<false>, GroupCodes<false>), N(GroupColumns<true>, GroupCodes<true>),        \
      C(Fp8BlockColumns), C(Fp8RowColumns), C(MxFp8Columns), N(MxFp4Columns, MxFp4Codes),        \
      C(NvFp4Columns), C(GgmlColumns<WeightFormat::kQ4_1>), C(GgmlColumns<WeightFormat::kQ5_0>), \
      C(GgmlColumns<WeightFormat::kQ5_1>), C(GgmlColumns<WeightFormat::kQ8_0>),                  \
      C(GgmlColumns<WeightFormat::kQ2K>), C(GgmlColumns<WeightFormat::kQ3K>),                    \
      C(GgmlColumns<WeightFormat::kQ4K>), C(GgmlColumns<WeightFormat::kQ5K>),                    \
      C(GgmlColumns<WeightFormat::kQ6K>), C(GgmlColumns<WeightFormat::kIQ4NL>),                  \
      C(GgmlColumns<WeightFormat::kIQ4XS>)

#define KT_TRANSPOSED(Columns) transposed_product<Columns>
#ifdef KT_AMX
// With tiles, bf16 is as fast as two digits of int8 would be.
#define KT_TRANSPOSED_INTEGERS(Columns, Codes) transposed_product<Columns>
#else
#define KT_TRANSPOSED_INTEGERS(Columns, Codes) transposed_integers<Codes>
#endif
constexpr TransposedProduct kTransposed[] = {KT_EACH_FORMAT(KT_TRANSPOSED, KT_TRANSPOSED_INTEGERS)};
static_assert(sizeof kTransposed / sizeof *kTransposed == kFormatCount,
              "a transposed product for each format");

#ifdef KT_AMX
#define KT_TURN(Columns) turn_weights<Columns>
#define KT_TURN_INTEGERS(Columns, Codes) turn_weights<Columns>
constexpr decltype(&turn_weights<Bf16Columns>) kTurnWeights[] = {
    KT_EACH_FORMAT(KT_TURN, KT_TURN_INTEGERS)};
constexpr TurnedKernels kTurnedKernels = {kTurnWeights, turn_rows, turned_sum};
constexpr const TurnedKernels* kTurned = &kTurnedKernels;
#else
constexpr const TurnedKernels* kTurned = nullptr;
#endif

constexpr TrainingKernels kTraining = {
    kTransposed, kTurned,  swiglu_backward_tile, outer_product, gather_columns, add_tile,
    keep_tile,   sum_rows, drop_columns,
};
