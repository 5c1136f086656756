#define KT_TABLE table_avx2
#define KT_NAME "avx2"
#define KT_FEATURES (sys::kAvx2)
#include "kernels.inl"
