// One matrix product by itself, through packing and quantisation: what the kernel tests call.
#pragma once
#include <cstdint>

#include "../pack/pack.h"
#include "kt/kernel_table.h"

namespace kt {

// out[r * ceil32(n) + c] = sum_k X[r,k] * W[c,k] for X [m, k] in row-major float32 and W as `layout`
// says, packed from its source. Throws std::invalid_argument for weights the format cannot hold, or
// a table without the kernel.
void single_product(const KernelTable& table, bool gemm, const MatrixLayout& layout,
                    const WeightSource& w, const float* x, int64_t m, float* out);

}  // namespace kt
