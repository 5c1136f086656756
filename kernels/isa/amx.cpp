#define KT_TABLE table_amx
#define KT_NAME "amx"
#define KT_FEATURES                                                                     \
  (sys::kAvx2 | sys::kAvx512 | sys::kAvx512Vnni | sys::kAvx512Vbmi | sys::kAvx512Bf16 | \
   sys::kAmxTile | sys::kAmxInt8 | sys::kAmxBf16)
#define KT_WIDE
#define KT_VNNI
#define KT_BF16_OPERANDS
#define KT_AMX
#include "kernels.inl"
