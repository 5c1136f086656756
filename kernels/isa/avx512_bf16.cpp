#define KT_TABLE table_avx512_bf16
#define KT_NAME "avx512_bf16"
#define KT_FEATURES (sys::kAvx2 | sys::kAvx512 | sys::kAvx512Vnni | sys::kAvx512Bf16)
#define KT_WIDE
#define KT_VNNI
#define KT_BF16_OPERANDS
#include "kernels.inl"
