// One matrix product by itself, through packing and quantisation: what the kernel tests call, and
// the parts of it that the kernel benchmark shares.
#pragma once
#include <cstdint>
#include <vector>

#include "../pack/pack.h"
#include "../sys/numa_memory.h"
#include "kt/kernel_table.h"

namespace kt {

// Layouts are those of checked_layout (moe/form.h).

// out[r * ceil32(n) + c] = sum_k X[r,k] * W[c,k] for X [m, k] in row-major float32 and W as
// `layout` says, packed from its source. Throws std::invalid_argument for weights the format cannot
// hold.
void single_product(const KernelTable& table, bool gemm, const MatrixLayout& layout,
                    const WeightSource& w, const float* x, int64_t m, float* out);

// The table's kernel for a layout.
const ProductKernel& kernel_of(const KernelTable& table, bool gemm, const MatrixLayout& layout);

// X [m, k] as the A operand that a kernel wants, with the slack that it may touch.
struct OperandRows {
  sys::Mapping memory;
  std::vector<float> scale;
  std::vector<int32_t> sum;
  ActRows rows{};  // views of the above
};
OperandRows operand_rows(const KernelTable& table, const ProductKernel& kernel,
                         const MatrixLayout& layout, const float* x, int64_t m);

// All tiles of a matrix. Throws std::invalid_argument for weights the format cannot hold.
sys::Mapping pack_whole(const MatrixLayout& layout, const WeightSource& w);

}  // namespace kt
