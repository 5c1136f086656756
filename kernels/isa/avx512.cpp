#define KT_TABLE table_avx512
#define KT_NAME "avx512"
#define KT_FEATURES (sys::kAvx2 | sys::kAvx512)
#define KT_WIDE
#include "kernels.inl"
