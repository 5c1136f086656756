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

#include "act_quant.inl"
#include "blocks.inl"
#include "merge.inl"
#include "product_bf16.inl"
#include "product_int.inl"
#include "swiglu.inl"
#ifdef KT_AMX
#include "product_amx.inl"
#else
void tiles_begin() {}
void tiles_end() {}
constexpr TileProduct tile_product_bf16 = nullptr;
constexpr TileProduct tile_product_int8 = nullptr;
constexpr TileProduct tile_product_int4 = nullptr;
#endif

#ifdef KT_BF16_OPERANDS
constexpr int kBf16ActBytes = 2;
constexpr HiddenAs kBf16Hidden = HiddenAs::kBF16;
#else
constexpr int kBf16ActBytes = 4;
constexpr HiddenAs kBf16Hidden = HiddenAs::kRoundedFloat;
#endif

// Rows per expert from which the tile kernel is used when the kind is not pinned.
constexpr int kTileMinRows = 5;

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
        {kBf16ActBytes, false, quantise_bf16, swiglu_tile<kBf16Hidden>, vector_product<Bf16Block>,
         tile_product_bf16, kTileMinRows},
        {1, true, quantise_int8_row, swiglu_tile<HiddenAs::kFloat>, vector_product<Int8Block>,
         tile_product_int8, kTileMinRows},
        {1, true, quantise_int8_row, swiglu_tile<HiddenAs::kFloat>, vector_product<Int4RowBlock>,
         tile_product_int4, kTileMinRows},
        {1, true, quantise_int8_groups, swiglu_tile<HiddenAs::kFloat>,
         vector_product<Int4GroupBlock>, nullptr, 0},
    },
    absmax_row,
    merge_tile,
    finish_columns,
    tiles_begin,
    tiles_end,
};

}  // namespace kt
