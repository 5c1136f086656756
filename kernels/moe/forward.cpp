#include "forward.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kt {
namespace {

// Part [begin, end) of n items for thread i of `threads`.
struct Share {
  int64_t begin, end;
  Share(int64_t n, int64_t i, int64_t threads)
      : begin(n * i / threads), end(n * (i + 1) / threads) {}
};

// Cost of one tile for m rows: below this many rows reading the weights is what takes the time.
int64_t tile_cost(int64_t rows) { return std::max<int64_t>(rows, 8); }

template <class T> T* as(const sys::Mapping& m) { return reinterpret_cast<T*>(m.data()); }

}  // namespace

ForwardJob::ForwardJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args)
    : layer_(std::move(layer)),
      config_(layer_->config),
      work_(*layer_->workspace),
      kernels_(layer_->kernels()),
      args_(args),
      plan_(config_.num_experts, config_.top_k, std::min(args.tokens, config_.max_tokens)) {}

int64_t ForwardJob::gemm_min_rows() const {
  if (!kernels_.gemm.product || config_.kind == KernelKind::kVector) return INT64_MAX;
  return config_.kind == KernelKind::kTile ? 1 : kernels_.gemm_min_rows;
}

void ForwardJob::run(sys::Worker& w) noexcept {
  const bool several_pools = w.team_threads != w.pool_threads;
  config_.table->thread_begin();
  for (Chunk chunk{0, 0}; chunk.first < args_.tokens; chunk.first += chunk.count) {
    chunk.count = std::min(config_.max_tokens, args_.tokens - chunk.first);
    tokens(w, chunk);
    w.team_barrier();
    if (plan_.any_gemm() && gathers()) {
      gather(w, chunk);
      w.team_barrier();
    }
    gate_up(w);
    if (kernels_.gemv.act == ActKind::kInt8Row) {
      // A row's scale comes from all of I, which the pools hold in parts.
      several_pools ? w.team_barrier() : w.pool_barrier();
      quantise_hidden(w);
    }
    w.pool_barrier();
    down(w, chunk);
    if (several_pools) w.team_barrier();
    finish(w, chunk);
    w.team_barrier();  // before the next chunk takes the buffers
  }
  config_.table->thread_end();
}

void ForwardJob::tokens(const sys::Worker& w, const Chunk& chunk) {
  const LayerConfig& c = config_;
  if (w.rank == 0) {
    plan_.build(args_.ids + chunk.first * c.top_k, args_.weights + chunk.first * c.top_k,
                chunk.count, c.on_cpu, gemm_min_rows());
    LayerStats& stats = layer_->stats;
    for (int64_t i = 0; i < plan_.active(); ++i)
      ++(plan_.expert(i).gemm ? stats.tile_calls : stats.vector_calls);
    if (chunk.first == 0) ++stats.forwards;
    stats.tokens += chunk.count;
    stats.expert_calls += plan_.pairs();
    stats.experts_touched += plan_.active();
  }
  const ActRows x = x_of_tokens();
  const int64_t columns = layer_->pools[0].up.cols_padded();
  const Share share(chunk.count, w.rank, w.team_threads);
  for (int64_t t = share.begin; t < share.end; ++t)
    quantise(kernels_.gemv.act, source_row(chunk.first + t), args_.dtype, c.hidden_size, columns, -1,
             x, t);
}

void ForwardJob::gather(const sys::Worker& w, const Chunk& chunk) {
  const int64_t columns = layer_->pools[0].up.cols_padded();
  const ProductKernel& gemm = kernels_.gemm;
  const bool same = gemm.act == kernels_.gemv.act;
  const ActRows x = x_of_tokens();
  const Share share(plan_.pairs(), w.rank, w.team_threads);
  for (int64_t i = 0; i < plan_.active(); ++i) {
    const ExpertRows& e = plan_.expert(i);
    if (!e.gemm) continue;
    const ActRows to = x_rows(e);
    const int64_t end = std::min(e.first + e.count, share.end);
    for (int64_t pair = std::max(e.first, share.begin); pair < end; ++pair) {
      const int64_t t = plan_.tokens()[pair], row = pair - e.first;
      if (same) {
        copy_to_blocks(x.data + t * x.stride, x.stride, const_cast<uint8_t*>(to.data), row);
        std::copy_n(x.scale + t * x.scales, x.scales,
                    const_cast<float*>(to.scale) + row * x.scales);
        std::copy_n(x.sum + t * x.sums, x.sums, const_cast<int32_t*>(to.sum) + row * x.sums);
        continue;
      }
      const void* source = source_row(chunk.first + t);
      if (!gemm.blocked) {
        quantise(gemm.act, source, args_.dtype, config_.hidden_size, columns, -1, to, row);
        continue;
      }
      ActRows one = to;  // a contiguous row first
      one.data = work_.thread_row(w.rank);
      one.scale += row * to.scales;
      one.sum += row * to.sums;
      quantise(gemm.act, source, args_.dtype, config_.hidden_size, columns, -1, one, 0);
      copy_to_blocks(one.data, to.stride, const_cast<uint8_t*>(to.data), row);
    }
  }
}

void ForwardJob::quantise(ActKind act, const void* src, DType dtype, int64_t k, int64_t padded,
                          float absmax, const ActRows& to, int64_t row) const {
  config_.table->quantise[int(act)](
      src, dtype, k, padded, absmax, const_cast<uint8_t*>(to.data) + row * to.stride,
      const_cast<float*>(to.scale) + row * to.scales, const_cast<int32_t*>(to.sum) + row * to.sums);
}

const uint8_t* ForwardJob::source_row(int64_t token) const {
  return static_cast<const uint8_t*>(args_.x) +
         token * config_.hidden_size * dtype_bytes(args_.dtype);
}

// The A rows of the chunk's tokens, for GEMV kernels.
ActRows ForwardJob::x_of_tokens() const {
  const ActKind act = kernels_.gemv.act;
  const int64_t columns = layer_->pools[0].up.cols_padded();
  return {work_.x.data(),          columns * act_bytes(act), as<float>(work_.x_scale),
          as<int32_t>(work_.x_sum), act_scales(act, columns), act_sums(act, columns), nullptr};
}

// The A rows of an expert's tokens: by index, or gathered.
ActRows ForwardJob::x_rows(const ExpertRows& e) const {
  if (!e.gemm || !gathers()) {
    ActRows x = x_of_tokens();
    x.index = plan_.tokens() + e.first;
    return x;
  }
  return rows_of(work_.gathered, work_.gathered_scale, work_.gathered_sum,
                 layer_->pools[0].up.cols_padded(), e);
}

ActRows ForwardJob::h_rows(int pool, const ExpertRows& e) const {
  const auto p = size_t(pool);
  return rows_of(work_.h[p], work_.h_scale[p], work_.h_sum[p], layer_->pools[p].down.cols_padded(),
                 e);
}

// An expert's rows in a buffer where every row has the room that the larger kind needs.
ActRows ForwardJob::rows_of(const sys::Mapping& data, const sys::Mapping& scale,
                            const sys::Mapping& sum, int64_t columns, const ExpertRows& e) const {
  const ActKind act = kernel(e).act, other = kernel(e).act == kernels_.gemv.act
                                                 ? kernels_.gemm.act
                                                 : kernels_.gemv.act;
  const auto room = [&](int64_t a, int64_t b) { return e.row * std::max(a, b); };
  return {data.data() + columns * room(act_bytes(act), act_bytes(other)),
          columns * act_bytes(act),
          as<float>(scale) + room(act_scales(act, columns), act_scales(other, columns)),
          as<int32_t>(sum) + room(act_sums(act, columns), act_sums(other, columns)),
          act_scales(act, columns),
          act_sums(act, columns),
          nullptr};
}

// 32 columns of h as part of its A row: `valid` values, then zeros.
void ForwardJob::h_tile(const ActRows& a, const ProductKernel& down, const float* values,
                        int64_t row, int64_t tile, int64_t valid) const {
  const int64_t bytes = kTileRows * act_bytes(down.act);
  const int64_t at = down.blocked ? row / kBlockRows * kBlockRows * a.stride +
                                        tile * kBlockRows * bytes + row % kBlockRows * bytes
                                  : row * a.stride + tile * bytes;
  config_.table->quantise[int(down.act)](
      values, DType::kFP32, valid, kTileRows, -1, const_cast<uint8_t*>(a.data) + at,
      const_cast<float*>(a.scale) + row * a.scales + tile * act_scales(down.act, kTileRows),
      const_cast<int32_t*>(a.sum) + row * a.sums + tile * act_sums(down.act, kTileRows));
}

void ForwardJob::gate_up(const sys::Worker& w) {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  if (!part.size) return;
  const int64_t tiles = part.up.tiles(), tile_bytes = part.up.tile_bytes();
  int64_t total = 0;
  for (int64_t i = 0; i < plan_.active(); ++i) total += tiles * tile_cost(plan_.expert(i).count);
  const Share share(total, w.index, w.pool_threads);  // in units of cost

  float* gate = work_.thread_scratch(w.rank);
  float* up = gate + (kRowBlock + kRowSlack) * kTileRows;
  // Where a row has one scale, its float32 values are kept until all of I is there.
  const bool whole_rows = kernels_.gemv.act == ActKind::kInt8Row;
  const int64_t all_columns = round_up(config_.intermediate_size, kTileRows);

  int64_t cost = 0;  // of the tiles before
  for (int64_t i = 0; i < plan_.active() && cost < share.end; ++i) {
    const ExpertRows& e = plan_.expert(i);
    const int64_t each = tile_cost(e.count);
    // A tile belongs to the thread in whose share its cost begins.
    const int64_t first = std::clamp<int64_t>(ceil_div(share.begin - cost, each), 0, tiles);
    const int64_t last = std::clamp<int64_t>(ceil_div(share.end - cost, each), 0, tiles);
    cost += tiles * each;
    if (first >= last) continue;
    const ProductKernel& product = kernel(e);
    const uint8_t* weights = layer_->expert(w.pool, e.slot);
    const float* gate_bias = layer_->bias(layer_->gate_bias, e.slot);
    const float* up_bias = layer_->bias(layer_->up_bias, e.slot);
    const ActRows all = x_rows(e);
    const ActRows h = h_rows(w.pool, e);
    for (int64_t tile = first; tile < last; ++tile) {
      const uint8_t* gate_tile = weights + 2 * tile * tile_bytes;
      const int64_t column = part.begin + tile * kTileRows;
      // Columns past I: an infinity in x times their zero weights is NaN, which must not reach the
      // down product.
      const int64_t valid = std::min(kTileRows, part.size - tile * kTileRows);
      const int64_t h_tiles = tile + 1 < tiles ? 1 : part.down.cols_padded() / kTileRows - tile;
      for (int64_t r = 0; r < e.count; r += kRowBlock) {
        const int64_t m = std::min(kRowBlock, e.count - r);
        const ActRows a = all.from(r);
        product.product(gate_tile, part.up, a, m, gate);
        product.product(gate_tile + tile_bytes, part.up, a, m, up);
        config_.table->swiglu(gate, up, gate_bias ? gate_bias + column : nullptr,
                              up_bias ? up_bias + column : nullptr, config_.activation, m, gate);
        for (int64_t row = r; row < r + m; ++row) {
          const float* values = gate + (row - r) * kTileRows;
          if (whole_rows) {
            std::copy_n(values, valid,
                        as<float>(work_.h_float) + (e.row + row) * all_columns + column);
            continue;
          }
          h_tile(h, product, values, row, tile, valid);
          for (int64_t pad = 1; pad < h_tiles; ++pad) h_tile(h, product, values, row, tile + pad, 0);
        }
      }
    }
  }
}

void ForwardJob::quantise_hidden(const sys::Worker& w) {
  const LayerConfig& c = config_;
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  if (!part.size) return;
  const int64_t all_columns = round_up(c.intermediate_size, kTileRows);
  const bool whole = part.size == c.intermediate_size;
  const Share share(plan_.pairs(), w.index, w.pool_threads);
  for (int64_t i = 0; i < plan_.active(); ++i) {
    const ExpertRows& e = plan_.expert(i);
    const int64_t end = std::min(e.first + e.count, share.end);
    const ActRows h = h_rows(w.pool, e);
    for (int64_t pair = std::max(e.first, share.begin); pair < end; ++pair) {
      const int64_t row = pair - e.first;
      const float* values = as<float>(work_.h_float) + (e.row + row) * all_columns;
      const float absmax = whole ? -1 : c.table->absmax(values, DType::kFP32, c.intermediate_size);
      ActRows to = h;
      if (kernel(e).blocked) {
        to.data = work_.thread_row(w.rank);
        to.scale += row;
        to.sum += row;
      }
      quantise(ActKind::kInt8Row, values + part.begin, DType::kFP32, part.size,
               part.down.cols_padded(), absmax, to, kernel(e).blocked ? 0 : row);
      if (kernel(e).blocked)
        copy_to_blocks(to.data, h.stride, const_cast<uint8_t*>(h.data), row);
    }
  }
}

void ForwardJob::down(const sys::Worker& w, const Chunk& chunk) {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  const Share share(part.down.tiles(), w.index, w.pool_threads);
  float* sum = as<float>(work_.sum[size_t(w.pool)]);
  const int64_t tile_floats = chunk.count * kTileRows;
  std::fill(sum + share.begin * tile_floats, sum + share.end * tile_floats, 0.0f);
  if (!part.size) return;

  float* out = work_.thread_scratch(w.rank);
  for (int64_t i = 0; i < plan_.active(); ++i) {
    const ExpertRows& e = plan_.expert(i);
    const ProductKernel& product = kernel(e);
    const ActRows h = h_rows(w.pool, e);
    const uint8_t* weights = layer_->expert(w.pool, e.slot) + 2 * part.up.bytes();
    // The bias counts once, so the pool that holds the first part of I adds it.
    const float* bias = part.begin == 0 ? layer_->bias(layer_->down_bias, e.slot) : nullptr;
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      for (int64_t r = 0; r < e.count; r += kRowBlock) {
        const int64_t m = std::min(kRowBlock, e.count - r);
        product.product(weights + tile * part.down.tile_bytes(), part.down, h.from(r), m, out);
        config_.table->merge(out, bias ? bias + tile * kTileRows : nullptr,
                             plan_.weights() + e.first + r, plan_.tokens() + e.first + r, m,
                             sum + tile * tile_floats);
      }
    }
  }
}

void ForwardJob::finish(const sys::Worker& w, const Chunk& chunk) {
  const int64_t h = config_.hidden_size, tiles = ceil_div(h, kTileRows);
  // With one pool a thread finishes the columns it summed, without a barrier in between.
  const Share share(tiles, w.rank, w.team_threads);
  const auto pools = int(work_.sum.size());
  const float* part[kMaxPools];
  const DType dtype = args_.partial ? DType::kFP32 : args_.dtype;
  auto* out =
      args_.partial ? reinterpret_cast<uint8_t*>(args_.partial) : static_cast<uint8_t*>(args_.out);
  for (int64_t tile = share.begin; tile < share.end; ++tile) {
    const int64_t column = tile * kTileRows, n = std::min(kTileRows, h - column);
    for (int64_t t = 0; t < chunk.count; ++t) {
      for (int p = 0; p < pools; ++p)
        part[p] = as<float>(work_.sum[size_t(p)]) + (tile * chunk.count + t) * kTileRows;
      const int64_t at = (chunk.first + t) * h + column;
      config_.table->finish(part, pools, args_.add ? args_.add + at : nullptr, n,
                            out + at * dtype_bytes(dtype), dtype);
    }
  }
}

}  // namespace kt
