#include "h_rows.h"

#include <algorithm>

namespace kt {

bool HRows::any_whole(const Plan& plan) const {
  const FormatKernels& down = pass_.kernels[kDown];
  return down.gemv.act == ActKind::kInt8Row ||
         (plan.any_gemm(kDown) && down.gemm.act == ActKind::kInt8Row);
}

ActRows HRows::rows(const ExpertRows& e) const {
  return act_rows(pass_.kernels[kDown], e.gemm[kDown], layout_.cols_padded(),
                  pass_.work.h[size_t(pass_.worker.pool)], e.row);
}

ActRows HRows::own() const {
  return act_rows(ActKind::kInt8Row, layout_.cols_padded(), pass_.space.h);
}

void HRows::keep(const ExpertRows& e, const float* values, int64_t first, int64_t m,
                 int64_t tile) const {
  const PoolPart& part = pass_.part();
  // Columns past I: an infinity in x times their zero weights gives NaN, which must not reach the
  // down product.
  const int64_t valid = std::min(kTileRows, part.size - tile * kTileRows);
  if (whole(e)) {
    float* to = whole_row(e, first) + part.begin + tile * kTileRows;
    for (int64_t r = 0; r < m; ++r, values += kTileRows, to += whole_stride())
      std::copy_n(values, valid, to);
    return;
  }
  const ActRows to = rows(e);
  const ProductKernel& kernel = pass_.kernel(e, kDown);
  const int64_t end = layout_.cols_padded() / kTileRows;
  const int64_t last = tile + 1 < part.layout[kUp].tiles() ? tile + 1 : end;
  for (int64_t r = first; r < first + m; ++r, values += kTileRows) {
    quantise_tile(to, kernel, values, r, tile, valid);
    for (int64_t pad = tile + 1; pad < last; ++pad) quantise_tile(to, kernel, values, r, pad, 0);
  }
}

// Writes 32 columns of h to their row: `valid` values, then zeros.
void HRows::quantise_tile(const ActRows& to, const ProductKernel& kernel, const float* values,
                          int64_t row, int64_t tile, int64_t valid) const {
  auto* data = const_cast<uint8_t*>(to.data);
  // In blocked rows, a tile's columns are a chunk.
  uint8_t* dst = kernel.blocked
                     ? blocked_row(data, to.stride, row) + tile * kBlockRows * kChunkBytes
                     : data + row * to.stride + tile * kTileRows * act_bytes(kernel.act);
  table_.quantise[int(kernel.act)](
      values, DType::kFP32, valid, kTileRows, -1, dst,
      const_cast<float*>(to.scale) + row * to.scales + tile * act_scales(kernel.act, kTileRows),
      const_cast<int32_t*>(to.sum) + row * to.sums + tile * act_sums(kernel.act, kTileRows));
}

void HRows::quantise(const ExpertRows& e, const ActRows& to, int64_t row) const {
  const PoolPart& part = pass_.part();
  const int64_t all = pass_.layer.config.intermediate_size;
  const float* values = whole_row(e, row);
  const float absmax = part.size == all ? -1 : table_.absmax(values, DType::kFP32, all);
  const bool blocked = pass_.kernel(e, kDown).blocked;
  ActRows one = to.from(row);
  if (blocked) one.data = pass_.space.row;  // converted to a contiguous row first
  quantise_row(table_, ActKind::kInt8Row, values + part.begin, DType::kFP32, part.size,
               layout_.cols_padded(), absmax, one, 0);
  if (blocked) copy_to_blocks(one.data, to.stride, const_cast<uint8_t*>(to.data), row);
}

}  // namespace kt
