#include "act_rows.h"

#include <algorithm>

namespace kt {

ActRows ActRowBuffers::x_of_tokens() const {
  const ActKind act = kernels.gemv.act;
  const int64_t columns = x_columns();
  return {work.x.data(),
          columns * act_bytes(act),
          as<float>(work.x_scale),
          as<int32_t>(work.x_sum),
          act_scales(act, columns),
          act_sums(act, columns),
          nullptr};
}

ActRows ActRowBuffers::x_of_tokens(const ThreadSpace& own) const {
  ActRows x = x_of_tokens();
  x.data = own.x;
  x.scale = own.x_scale;
  x.sum = own.x_sum;
  return x;
}

ActRows ActRowBuffers::gathered(const ExpertRows& e) const {
  return rows_of(work.gathered, work.gathered_scale, work.gathered_sum, x_columns(), e);
}

ActRows ActRowBuffers::h(int pool, const ExpertRows& e) const {
  const auto p = size_t(pool);
  return rows_of(work.h[p], work.h_scale[p], work.h_sum[p], layer.pools[p].down.cols_padded(), e);
}

ActRows ActRowBuffers::own_h(int pool, const ThreadSpace& own) const {
  const int64_t columns = layer.pools[size_t(pool)].down.cols_padded();
  return {own.h, columns, own.h_scale, own.h_sum, 1, 1, nullptr};
}

// An expert's rows in a buffer where every row has the room that the larger kind needs.
ActRows ActRowBuffers::rows_of(const sys::Mapping& data, const sys::Mapping& scale,
                               const sys::Mapping& sum, int64_t columns,
                               const ExpertRows& e) const {
  const ActKind act = kernel(e).act,
                other = act == kernels.gemv.act ? kernels.gemm.act : kernels.gemv.act;
  const auto room = [&](int64_t a, int64_t b) { return e.row * std::max(a, b); };
  return {data.data() + columns * room(act_bytes(act), act_bytes(other)),
          columns * act_bytes(act),
          as<float>(scale) + room(act_scales(act, columns), act_scales(other, columns)),
          as<int32_t>(sum) + room(act_sums(act, columns), act_sums(other, columns)),
          act_scales(act, columns),
          act_sums(act, columns),
          nullptr};
}

void ActRowBuffers::quantise(ActKind act, const void* src, DType dtype, int64_t k, int64_t padded,
                             float absmax, const ActRows& to, int64_t row) const {
  layer.config.table->quantise[int(act)](
      src, dtype, k, padded, absmax, const_cast<uint8_t*>(to.data) + row * to.stride,
      const_cast<float*>(to.scale) + row * to.scales, const_cast<int32_t*>(to.sum) + row * to.sums);
}

void ActRowBuffers::quantise_tile(const ActRows& a, const ProductKernel& down, const float* values,
                                  int64_t row, int64_t tile, int64_t valid) const {
  const int64_t bytes = kTileRows * act_bytes(down.act);
  auto* data = const_cast<uint8_t*>(a.data);
  // In blocks of rows, a tile's columns are a chunk.
  uint8_t* dst = down.blocked ? blocked_row(data, a.stride, row) + tile * kBlockRows * kChunkBytes
                              : data + row * a.stride + tile * bytes;
  layer.config.table->quantise[int(down.act)](
      values, DType::kFP32, valid, kTileRows, -1, dst,
      const_cast<float*>(a.scale) + row * a.scales + tile * act_scales(down.act, kTileRows),
      const_cast<int32_t*>(a.sum) + row * a.sums + tile * act_sums(down.act, kTileRows));
}

void ActRowBuffers::quantise_whole_row(int pool, const ProductKernel& down, const float* values,
                                       const ActRows& to, int64_t row, uint8_t* contiguous) const {
  const LayerConfig& c = layer.config;
  const PoolPart& part = layer.pools[size_t(pool)];
  const bool whole = part.size == c.intermediate_size;
  const float absmax = whole ? -1 : c.table->absmax(values, DType::kFP32, c.intermediate_size);
  ActRows dst = to;
  if (down.blocked) {
    dst.data = contiguous;
    dst.scale += row;
    dst.sum += row;
  }
  quantise(ActKind::kInt8Row, values + part.begin, DType::kFP32, part.size, part.down.cols_padded(),
           absmax, dst, down.blocked ? 0 : row);
  if (down.blocked) copy_to_blocks(contiguous, to.stride, const_cast<uint8_t*>(to.data), row);
}

}  // namespace kt
