#include "act_rows.h"

#include <algorithm>

namespace kt {

ActRows ActRowBuffers::x_of_tokens(Matrix m) const {
  const ActKind act = kernels[m].gemv.act;
  const int64_t columns = x_columns();
  const ActBuffer& x = work.x[x_buffer(m)];
  return {x.data.data(),
          columns * act_bytes(act),
          as<float>(x.scale),
          as<int32_t>(x.sum),
          act_scales(act, columns),
          act_sums(act, columns),
          nullptr};
}

ActRows ActRowBuffers::x_of_tokens(Matrix m, const ThreadSpace& own) const {
  ActRows x = x_of_tokens(m);
  const OwnRows& rows = own.x[x_buffer(m)];
  x.data = rows.data;
  x.scale = rows.scale;
  x.sum = rows.sum;
  return x;
}

ActRows ActRowBuffers::gathered(const ExpertRows& e, Matrix m) const {
  if (m == kUp && shares_gathered(e)) m = kGate;
  return rows_of(work.gathered[m], x_columns(), e, m);
}

ActRows ActRowBuffers::h(int pool, const ExpertRows& e) const {
  const auto p = size_t(pool);
  return rows_of(work.h[p], layer.pools[p].layout[kDown].cols_padded(), e, kDown);
}

ActRows ActRowBuffers::own_h(int pool, const ThreadSpace& own) const {
  const int64_t columns = layer.pools[size_t(pool)].layout[kDown].cols_padded();
  return {own.h.data, columns, own.h.scale, own.h.sum, 1, 1, nullptr};
}

// An expert's rows in a buffer where every row has the room that the larger kind needs.
ActRows ActRowBuffers::rows_of(const ActBuffer& buffer, int64_t columns, const ExpertRows& e,
                               Matrix m) const {
  const FormatKernels& both = kernels[m];
  const ActKind act = kernel(e, m).act,
                other = act == both.gemv.act ? both.gemm.act : both.gemv.act;
  const auto room = [&](int64_t a, int64_t b) { return e.row * std::max(a, b); };
  return {buffer.data.data() + columns * room(act_bytes(act), act_bytes(other)),
          columns * act_bytes(act),
          as<float>(buffer.scale) + room(act_scales(act, columns), act_scales(other, columns)),
          as<int32_t>(buffer.sum) + room(act_sums(act, columns), act_sums(other, columns)),
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
  quantise(ActKind::kInt8Row, values + part.begin, DType::kFP32, part.size,
           part.layout[kDown].cols_padded(), absmax, dst, down.blocked ? 0 : row);
  if (down.blocked) copy_to_blocks(contiguous, to.stride, const_cast<uint8_t*>(to.data), row);
}

}  // namespace kt
