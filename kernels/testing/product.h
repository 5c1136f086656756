// A single matrix product, including packing and quantisation: used by the kernel tests and, in
// parts, by the kernel benchmark.
#pragma once
#include <cstdint>
#include <vector>

#include "../pack/pack.h"
#include "../sys/numa_memory.h"
#include "kt/kernel_table.h"

namespace kt {

// Layouts come from checked_layout (moe/form.h).

// out[r * ceil32(n) + c] = sum_k X[r,k] * W[c,k] for X [m, k] in row-major float32 and W in
// `layout`, packed from its source. Throws std::invalid_argument if the format cannot hold the
// weights.
void single_product(const KernelTable& table, bool gemm, const MatrixLayout& layout,
                    const WeightSource& w, const float* x, int64_t m, float* out);

// The table's kernel for a layout.
const ProductKernel& kernel_of(const KernelTable& table, bool gemm, const MatrixLayout& layout);

// X [m, k] as the A operand of a kernel, with the extra rows that the kernel may touch.
struct OperandRows {
  sys::Mapping memory;
  std::vector<float> scale;
  std::vector<int32_t> sum;
  ActRows rows{};  // views of the above
};
OperandRows operand_rows(const KernelTable& table, const ProductKernel& kernel,
                         const MatrixLayout& layout, const float* x, int64_t m);

// Packs all tiles of a matrix. Throws std::invalid_argument if the format cannot hold the weights.
sys::Mapping pack_whole(const MatrixLayout& layout, const WeightSource& w);

}  // namespace kt
