// All kernels of one instruction set and its table. An isa/<name>.cpp defines
//   KT_TABLE      the variable's name             KT_NAME      the table's name
//   KT_FEATURES   required sys::Feature bits      KT_WIDE      512-bit vectors
//   KT_VNNI, KT_BF16_OPERANDS, KT_AMX             what else the kernels may use
// and includes this file, once. Everything is in an anonymous namespace: a symbol shared with
// another instruction set's object could be kept by the linker in the wrong version.
#ifdef KT_EMULATE
#include "emul/emul512.h"
#ifdef KT_AMX
#include "emul/emul_amx.h"
#endif
#else
#include <immintrin.h>
#endif

#include <cstddef>

#include "../sys/cpu_features.h"
#include "kt/kernel_table.h"

namespace kt {
namespace {

#ifdef KT_WIDE
#include "simd_avx512.inl"
#else
#include "simd_avx2.inl"
#endif
#include "convert.inl"
#include "decode.inl"
#include "planes.inl"

#include "act_quant.inl"
#include "blocks.inl"
#include "codes.inl"
#include "merge.inl"
#include "swiglu.inl"

#include "gemv_bf16.inl"
#include "gemv_fp8.inl"
#include "gemv_group.inl"
#include "gemv_int.inl"

#include "gemv_ggml.inl"

#include "dequantise.inl"
#ifdef KT_WIDE
#include "gemm_simd_avx512.inl"
#else
#include "gemm_simd_avx2.inl"
#endif
#ifdef KT_AMX
#include "gemm_amx.inl"
#include "unpack_bf16.inl"
#include "unpack_e2m1.inl"
#include "unpack_e4m3.inl"
#include "unpack_ggml.inl"
#include "unpack_int4.inl"
#include "unpack_int8.inl"
template <WeightFormat format>
constexpr ProductKernel kGgmlGemm{ActKind::kBF16, true, tile_product<GgmlUnits<format>>};
// By WeightFormat.
constexpr ProductKernel kGemm[kFormatCount] = {
    {ActKind::kBF16, true, tile_product<Bf16Units>},
    {ActKind::kInt8Row, true, tile_product<Int8Units>},
    {ActKind::kInt8Row, true, tile_product<Int4RowUnits>},
    {ActKind::kBF16, true, tile_product<Int4GroupUnits<false>>},
    {ActKind::kBF16, true, tile_product<Int4GroupUnits<true>>},
    {ActKind::kBF16, true, tile_product<Fp8Units<false>>},
    {ActKind::kBF16, true, tile_product<Fp8Units<true>>},
    {ActKind::kBF16, true, tile_product<MxFp8Units>},
    {ActKind::kBF16, true, tile_product<MxFp4Units>},
    {ActKind::kBF16, true, tile_product<NvFp4Units>},
    kGgmlGemm<WeightFormat::kQ4_1>,
    kGgmlGemm<WeightFormat::kQ5_0>,
    kGgmlGemm<WeightFormat::kQ5_1>,
    kGgmlGemm<WeightFormat::kQ8_0>,
    kGgmlGemm<WeightFormat::kQ2K>,
    kGgmlGemm<WeightFormat::kQ3K>,
    kGgmlGemm<WeightFormat::kQ4K>,
    kGgmlGemm<WeightFormat::kQ5K>,
    kGgmlGemm<WeightFormat::kQ6K>,
    kGgmlGemm<WeightFormat::kIQ4NL>,
    kGgmlGemm<WeightFormat::kIQ4XS>,
};
#else
#include "gemm_rows.inl"
#include "unpack_float.inl"
#include "unpack_ggml_float.inl"

#include "gemm_float.inl"
#include "gemm_int.inl"
void tiles_begin() {}
void tiles_end() {}
// Integer weights with a scale per group are multiplied fastest as such where there is dpbusd, and
// GEMV kernels do not wait for memory once a tile is in the cache. Elsewhere float32 FMA is as
// fast.
#ifdef KT_VNNI
template <class Scales, class>
constexpr ProductKernel kGroupGemm{ActKind::kInt16Group, false, vector_product<GroupBlock<Scales>>};
#else
template <class, class Columns>
constexpr ProductKernel kGroupGemm{ActKind::kFloat, false, gemm_float<Columns>};
#endif
template <WeightFormat format>
constexpr ProductKernel kGgmlGemm = kGroupGemm<GgmlScales<format>, GgmlColumns<format>>;
// By WeightFormat. BF16 weights are multiplied as float32 also where there is dpbf16: on Intel it
// has half the rate of two FMAs.
constexpr ProductKernel kGemm[kFormatCount] = {
    {ActKind::kFloat, false, gemm_float<Bf16Columns>},
    {ActKind::kInt8Row, false, gemm_int8_row},
    {ActKind::kInt8Row, false, gemm_int4_row},
    kGroupGemm<Int4Scales, GroupColumns<false>>,
    kGroupGemm<Int4ZeroScales, GroupColumns<true>>,
    {ActKind::kFloat, false, gemm_float<Fp8BlockColumns>},
    {ActKind::kFloat, false, gemm_float<Fp8RowColumns>},
    {ActKind::kFloat, false, gemm_float<MxFp8Columns>},
    kGroupGemm<MxFp4Scales, MxFp4Columns>,
    {ActKind::kFloat, false, gemm_float<NvFp4Columns>},
    kGgmlGemm<WeightFormat::kQ4_1>,
    kGgmlGemm<WeightFormat::kQ5_0>,
    kGgmlGemm<WeightFormat::kQ5_1>,
    kGgmlGemm<WeightFormat::kQ8_0>,
    kGgmlGemm<WeightFormat::kQ2K>,
    kGgmlGemm<WeightFormat::kQ3K>,
    kGgmlGemm<WeightFormat::kQ4K>,
    kGgmlGemm<WeightFormat::kQ5K>,
    kGgmlGemm<WeightFormat::kQ6K>,
    kGgmlGemm<WeightFormat::kIQ4NL>,
    kGgmlGemm<WeightFormat::kIQ4XS>,
};
#endif

#ifdef KT_BF16_OPERANDS
constexpr ActKind kVectorAct = ActKind::kBF16;  // of BF16 weights
#else
constexpr ActKind kVectorAct = ActKind::kFloat;
#endif

template <WeightFormat format>
constexpr ProductKernel kGgmlGemv{ActKind::kInt16Group, false,
                                  vector_product<GroupBlock<GgmlScales<format>>>};

// Rows per expert from which GEMM is used when the kind is not pinned, by WeightFormat: where it
// begins to cost no more than GEMV, measured on one core with weights from memory.
#if defined(KT_AMX)
constexpr int kGemmMinRows[kFormatCount] = {4, 6, 7, 8, 8, 4, 4, 4, 5, 5, 9,
                                            9, 7, 9, 9, 7, 9, 9, 8, 8, 8};
#elif defined(KT_VNNI)
constexpr int kGemmMinRows[kFormatCount] = {5, 16, 12, 5, 5, 9, 9, 9, 5, 12, 5,
                                            5, 5,  5,  5, 5, 5, 5, 5, 5, 5};
#elif defined(KT_WIDE)
constexpr int kGemmMinRows[kFormatCount] = {5,  9,  16, 16, 16, 9,  9,  5,  12, 5, 24,
                                            20, 16, 13, 20, 20, 24, 24, 14, 14, 20};
#else
constexpr int kGemmMinRows[kFormatCount] = {5,  9,  2,  64, 64, 8,  8,  8,  12, 5, 64,
                                            40, 24, 64, 24, 24, 64, 28, 16, 48, 48};
#endif

}  // namespace

extern const KernelTable KT_TABLE;
const KernelTable KT_TABLE = {
    KT_NAME,
#ifdef KT_EMULATE
    sys::kAvx2,
#else
    KT_FEATURES,
#endif
    {
        {{kVectorAct, false, vector_product<Bf16Block>}, kGemm[0], kGemmMinRows[0]},
        {{ActKind::kInt8Row, false, vector_product<Int8Block>}, kGemm[1], kGemmMinRows[1]},
        {{ActKind::kInt8Row, false, vector_product<Int4RowBlock>}, kGemm[2], kGemmMinRows[2]},
        {{ActKind::kInt16Group, false, vector_product<GroupBlock<Int4Scales>>},
         kGemm[3],
         kGemmMinRows[3]},
        {{ActKind::kInt16Group, false, vector_product<GroupBlock<Int4ZeroScales>>},
         kGemm[4],
         kGemmMinRows[4]},
        {{ActKind::kFloat, false, vector_product<Fp8BlockBlock>}, kGemm[5], kGemmMinRows[5]},
        {{ActKind::kFloat, false, vector_product<Fp8RowBlock>}, kGemm[6], kGemmMinRows[6]},
        {{ActKind::kFloat, false, vector_product<MxFp8Block>}, kGemm[7], kGemmMinRows[7]},
        {{ActKind::kInt16Group, false, vector_product<GroupBlock<MxFp4Scales>>},
         kGemm[8],
         kGemmMinRows[8]},
        {{ActKind::kInt16Group, false, vector_product<GroupBlock<NvFp4Scales>>},
         kGemm[9],
         kGemmMinRows[9]},
        {kGgmlGemv<WeightFormat::kQ4_1>, kGemm[10], kGemmMinRows[10]},
        {kGgmlGemv<WeightFormat::kQ5_0>, kGemm[11], kGemmMinRows[11]},
        {kGgmlGemv<WeightFormat::kQ5_1>, kGemm[12], kGemmMinRows[12]},
        {kGgmlGemv<WeightFormat::kQ8_0>, kGemm[13], kGemmMinRows[13]},
        {kGgmlGemv<WeightFormat::kQ2K>, kGemm[14], kGemmMinRows[14]},
        {kGgmlGemv<WeightFormat::kQ3K>, kGemm[15], kGemmMinRows[15]},
        {kGgmlGemv<WeightFormat::kQ4K>, kGemm[16], kGemmMinRows[16]},
        {kGgmlGemv<WeightFormat::kQ5K>, kGemm[17], kGemmMinRows[17]},
        {kGgmlGemv<WeightFormat::kQ6K>, kGemm[18], kGemmMinRows[18]},
        {kGgmlGemv<WeightFormat::kIQ4NL>, kGemm[19], kGemmMinRows[19]},
        {kGgmlGemv<WeightFormat::kIQ4XS>, kGemm[20], kGemmMinRows[20]},
    },
    {quantise_float, quantise_bf16, quantise_int8_row, quantise_int16_groups},
    swiglu_tile,
    absmax_row,
    merge_tile,
    finish_columns,
    tiles_begin,
    tiles_end,
};

}  // namespace kt
