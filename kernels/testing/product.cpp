#include "product.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../moe/act_rows.h"
#include "../moe/form.h"

namespace kt {

const ProductKernel& kernel_of(const KernelTable& table, bool gemm, const MatrixLayout& layout) {
  const FormatKernels& kernels = table.format[int(layout.format)];
  return gemm ? kernels.gemm : kernels.gemv;
}

OperandRows operand_rows(const KernelTable& table, const ProductKernel& kernel,
                         const MatrixLayout& layout, const float* x, int64_t m) {
  const int64_t k = layout.cols, padded = layout.cols_padded();
  const ActRows one = act_rows(kernel.act, padded, {});
  OperandRows made{sys::Mapping(size_t((m + kRowSlack) * one.stride)),
                   std::vector<float>(size_t(m * one.scales)),
                   std::vector<int32_t>(size_t(m * one.sums))};
  made.rows =
      act_rows(kernel.act, padded, {made.memory.data(), made.scale.data(), made.sum.data()});
  std::vector<uint8_t> row(static_cast<size_t>(one.stride));
  for (int64_t r = 0; r < m; ++r) {
    ActRows to = made.rows.from(r);
    if (kernel.blocked) to.data = row.data();
    quantise_row(table, kernel.act, x + r * k, DType::kFP32, k, padded, -1, to, 0);
    if (kernel.blocked) copy_to_blocks(row.data(), one.stride, made.memory.data(), r);
  }
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
