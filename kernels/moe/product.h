// One matrix product by itself, through packing and quantisation: what the kernel tests call.
#pragma once
#include <cstdint>

#include "kt/kernel_table.h"

namespace kt {

// out[r * ceil32(n) + c] = sum_k X[r,k] * W[c,k] for X [m, k] and W [n, k] in row-major float32.
// Throws std::invalid_argument for weights the format cannot hold, or a table without the kind.
void dense_product(const KernelTable& table, bool tile_kind, WeightFormat format, int group,
                   const float* w, int64_t n, const float* x, int64_t m, int64_t k, float* out);

}  // namespace kt
