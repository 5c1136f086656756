// The list of tables in this module. KT_ISA_* define which objects are linked in.
#include "kt/kernel_table.h"

namespace kt {

extern const KernelTable table_avx2, table_avx512, table_avx512_vnni, table_avx512_bf16, table_amx;

const KernelTable* const kKernelTables[] = {
#ifdef KT_ISA_AMX
    &table_amx,
#endif
#ifdef KT_ISA_AVX512_BF16
    &table_avx512_bf16,
#endif
#ifdef KT_ISA_AVX512_VNNI
    &table_avx512_vnni,
#endif
#ifdef KT_ISA_AVX512
    &table_avx512,
#endif
    &table_avx2,        nullptr,
};

}  // namespace kt
