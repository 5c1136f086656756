#define KT_TABLE table_avx512_vnni
#define KT_NAME "avx512_vnni"
#define KT_FEATURES (sys::kAvx2 | sys::kAvx512 | sys::kAvx512Vnni)
#define KT_WIDE
#define KT_VNNI
#include "kernels.inl"
