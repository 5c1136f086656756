#include "product.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "../pack/pack.h"
#include "workspace.h"

namespace kt {

void dense_product(const KernelTable& table, bool tile_kind, WeightFormat format, int group,
                   const float* w, int64_t n, const float* x, int64_t m, int64_t k, float* out) {
  if (int(format) < 0 || int(format) >= kFormatCount || n < 1 || m < 0 || k < 1 ||
      k > kMaxColumns || (format == WeightFormat::kInt4Group) != (group > 0) ||
      (group && (group % 32 || k % group)))
    throw std::invalid_argument("no such product");
  const FormatKernels& kernels = table.format[int(format)];
  const TileProduct product = tile_kind ? kernels.tile : kernels.vector;
  if (!product) throw std::invalid_argument("no such kernel for this format");
  const MatrixLayout layout{format, n, k, group};
  const int64_t padded = layout.cols_padded(), groups = group ? padded / group : 1;
  const int64_t stride = padded * kernels.act_bytes;
  sys::Mapping rows(size_t((m + kRowSlack) * stride));
  std::vector<uint8_t> row(static_cast<size_t>(stride));
  std::vector<float> scale(size_t(m * groups));
  std::vector<int32_t> sum(size_t(m * groups));
  for (int64_t r = 0; r < m; ++r) {
    kernels.quantise(x + r * k, DType::kFP32, k, padded, group, -1, row.data(),
                     scale.data() + r * groups, sum.data() + r * groups);
    if (tile_kind)
      copy_to_blocks(row.data(), stride, rows.data(), r);
    else
      std::copy(row.begin(), row.end(), rows.data() + r * stride);
  }
  const ActRows a{rows.data(), stride, scale.data(), sum.data(), groups, nullptr};

  const MatrixSource source{w, DType::kFP32, k, 0, 0};
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
    product(packed.data(), layout, a, m, tile_out.data());
    for (int64_t r = 0; r < m; ++r)
      std::copy_n(tile_out.data() + r * kTileRows, kTileRows,
                  out + r * layout.tiles() * kTileRows + tile * kTileRows);
  }
  table.thread_end();
}

}  // namespace kt
