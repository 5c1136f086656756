#include "product.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../moe/form.h"
#include "../moe/workspace.h"

namespace kt {

const ProductKernel& kernel_of(const KernelTable& table, bool gemm, const MatrixLayout& layout) {
  const FormatKernels& kernels = table.format[int(layout.format)];
  return gemm ? kernels.gemm : kernels.gemv;
}

OperandRows operand_rows(const KernelTable& table, const ProductKernel& kernel,
                         const MatrixLayout& layout, const float* x, int64_t m) {
  const int64_t k = layout.cols, padded = layout.cols_padded();
  const int64_t stride = padded * act_bytes(kernel.act);
  const int64_t scales = act_scales(kernel.act, padded), sums = act_sums(kernel.act, padded);
  OperandRows made{sys::Mapping(size_t((m + kRowSlack) * stride)),
                   std::vector<float>(size_t(m * scales)), std::vector<int32_t>(size_t(m * sums))};
  std::vector<uint8_t> row(static_cast<size_t>(stride));
  for (int64_t r = 0; r < m; ++r) {
    table.quantise[int(kernel.act)](x + r * k, DType::kFP32, k, padded, -1, row.data(),
                                    made.scale.data() + r * scales, made.sum.data() + r * sums);
    if (kernel.blocked)
      copy_to_blocks(row.data(), stride, made.memory.data(), r);
    else
      std::copy(row.begin(), row.end(), made.memory.data() + r * stride);
  }
  made.rows = {
      made.memory.data(), stride, made.scale.data(), made.sum.data(), scales, sums, nullptr};
  return made;
}

sys::Mapping pack_whole(const MatrixLayout& layout, const WeightSource& w) {
  check_source(w, "w");
  const MatrixSource source{w, layout.cols, 0, 0};
  sys::Mapping packed{size_t(layout.bytes())};
  std::vector<float> scratch(size_t(pack_scratch(layout, w)));
  for (int64_t tile = 0, bad_row = 0; tile < layout.tiles(); ++tile)
    if (const PackError error = pack_tile(layout, source, tile, scratch.data(),
                                          packed.data() + tile * layout.tile_bytes(), &bad_row);
        error != PackError::kNone)
      throw std::invalid_argument("row " + std::to_string(bad_row) + ": " + describe(error));
  return packed;
}

void single_product(const KernelTable& table, bool gemm, const MatrixLayout& layout,
                    const WeightSource& w, const float* x, int64_t m, float* out) {
  const ProductKernel& kernel = kernel_of(table, gemm, layout);
  const OperandRows a = operand_rows(table, kernel, layout, x, m);
  const sys::Mapping packed = pack_whole(layout, w);
  std::vector<float> tile_out(size_t((m + kRowSlack) * kTileRows));
  table.thread_begin();
  for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
    kernel.product(packed.data() + tile * layout.tile_bytes(), layout, a.rows, m, tile_out.data());
    for (int64_t r = 0; r < m; ++r)
      std::copy_n(tile_out.data() + r * kTileRows, kTileRows,
                  out + r * layout.tiles() * kTileRows + tile * kTileRows);
  }
  table.thread_end();
}

}  // namespace kt
