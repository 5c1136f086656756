#include "product.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "workspace.h"

namespace kt {

void single_product(const KernelTable& table, bool gemm, const MatrixLayout& layout,
                    const WeightSource& w, const float* x, int64_t m, float* out) {
  const int64_t k = layout.cols;
  if (int(layout.format) < 0 || int(layout.format) >= kFormatCount || layout.rows < 1 || m < 0 ||
      k < 1 || k > kMaxColumns || layout.has_group() != (layout.group > 0) || layout.group % 32 ||
      k % layout.column_unit())
    throw std::invalid_argument("no such product");
  const FormatKernels& kernels = table.format[int(layout.format)];
  const ProductKernel& kernel = gemm ? kernels.gemm : kernels.gemv;
  if (!kernel.product) throw std::invalid_argument("no such kernel for this format");
  const int64_t padded = layout.cols_padded(), stride = padded * act_bytes(kernel.act);
  const int64_t scales = act_scales(kernel.act, padded), sums = act_sums(kernel.act, padded);
  sys::Mapping rows(size_t((m + kRowSlack) * stride));
  std::vector<uint8_t> row(static_cast<size_t>(stride));
  std::vector<float> scale(size_t(m * scales));
  std::vector<int32_t> sum(size_t(m * sums));
  for (int64_t r = 0; r < m; ++r) {
    table.quantise[int(kernel.act)](x + r * k, DType::kFP32, k, padded, -1, row.data(),
                                    scale.data() + r * scales, sum.data() + r * sums);
    if (kernel.blocked)
      copy_to_blocks(row.data(), stride, rows.data(), r);
    else
      std::copy(row.begin(), row.end(), rows.data() + r * stride);
  }
  const ActRows a{rows.data(), stride, scale.data(), sum.data(), scales, sums, nullptr};

  const MatrixSource source{w, k, 0, 0};
  for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
    int64_t bad_row = 0;
    if (check_tile(layout, source, tile, &bad_row) != PackError::kNone)
      throw std::invalid_argument("row " + std::to_string(bad_row) + " cannot be packed");
  }
  sys::Mapping packed(size_t(layout.tile_bytes()));
  std::vector<float> scratch(size_t(pack_scratch(layout)));
  std::vector<float> tile_out(size_t((m + kRowSlack) * kTileRows));
  table.thread_begin();
  for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
    pack_tile(layout, source, tile, scratch.data(), packed.data());
    kernel.product(packed.data(), layout, a, m, tile_out.data());
    for (int64_t r = 0; r < m; ++r)
      std::copy_n(tile_out.data() + r * kTileRows, kTileRows,
                  out + r * layout.tiles() * kTileRows + tile * kTileRows);
  }
  table.thread_end();
}

}  // namespace kt
