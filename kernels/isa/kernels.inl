// All kernels of one instruction set and its table. An isa/<name>.cpp defines
//   KT_TABLE      the variable's name             KT_NAME      the table's name
//   KT_FEATURES   required sys::Feature bits      KT_WIDE      512-bit vectors
//   KT_VNNI, KT_BF16_OPERANDS, KT_AMX             what else the kernels may use
// and includes this file once. Everything is in an anonymous namespace: of a symbol shared with
// another instruction set's object, the linker could keep the wrong version.
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
#include "kt/training.h"

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
#include "activation.inl"
#include "blocks.inl"
#include "codes.inl"
#include "merge.inl"

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
#else
#include "gemm_rows.inl"
#include "unpack_float.inl"
#include "unpack_ggml_float.inl"

#include "gemm_float.inl"
#include "gemm_int.inl"
void tiles_begin() {}
void tiles_end() {}
#endif

#include "formats.inl"

#include "training.inl"

}  // namespace

extern const KernelTable KT_TABLE;
const KernelTable KT_TABLE = {
    KT_NAME,
#ifdef KT_EMULATE
    sys::kAvx2,
#else
    KT_FEATURES,
#endif
    kFormatKernels, {quantise_float, quantise_bf16, quantise_int8_row, quantise_int16_groups},
    activate_tile,  absmax_row,
    merge_tile,     finish_columns,
    tiles_begin,    tiles_end,
    &kTraining,
};

}  // namespace kt
