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
      x_shape_(shape_of(layer_->pools[0].up)),
      plan_(config_.num_experts, config_.top_k, std::min(args.tokens, config_.max_tokens)) {}

int64_t ForwardJob::tile_min_rows() const {
  if (!kernels_.tile || config_.kind == KernelKind::kVector) return INT64_MAX;
  return config_.kind == KernelKind::kTile ? 1 : kernels_.tile_min_rows;
}

ForwardJob::RowShape ForwardJob::shape_of(const MatrixLayout& layout) const {
  const int64_t columns = layout.cols_padded();
  return {columns, layout.group ? columns / layout.group : 1, columns * kernels_.act_bytes};
}

void ForwardJob::run(sys::Worker& w) noexcept {
  const bool several_pools = w.team_threads != w.pool_threads;
  config_.table->thread_begin();
  for (Chunk chunk{0, 0}; chunk.first < args_.tokens; chunk.first += chunk.count) {
    chunk.count = std::min(config_.max_tokens, args_.tokens - chunk.first);
    tokens(w, chunk);
    w.team_barrier();
    if (plan_.any_tile()) {
      gather(w);
      w.team_barrier();
    }
    gate_up(w);
    if (kernels_.quantise_h) {
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
                chunk.count, c.on_cpu, tile_min_rows());
    LayerStats& stats = layer_->stats;
    for (int64_t i = 0; i < plan_.active(); ++i)
      ++(plan_.expert(i).tile ? stats.tile_calls : stats.vector_calls);
    if (chunk.first == 0) ++stats.forwards;
    stats.tokens += chunk.count;
    stats.expert_calls += plan_.pairs();
    stats.experts_touched += plan_.active();
  }
  const auto [columns, groups, stride] = x_shape_;
  const Share share(chunk.count, w.rank, w.team_threads);
  for (int64_t t = share.begin; t < share.end; ++t) {
    const auto* row = static_cast<const uint8_t*>(args_.x) +
                      (chunk.first + t) * c.hidden_size * dtype_bytes(args_.dtype);
    kernels_.quantise(row, args_.dtype, c.hidden_size, columns, c.group, -1,
                      work_.x.data() + t * stride, as<float>(work_.x_scale) + t * groups,
                      as<int32_t>(work_.x_sum) + t * groups);
  }
}

void ForwardJob::gather(const sys::Worker& w) {
  const auto [columns, groups, stride] = x_shape_;
  const Share share(plan_.pairs(), w.rank, w.team_threads);
  for (int64_t i = 0; i < plan_.active(); ++i) {
    const ExpertRows& e = plan_.expert(i);
    if (!e.tile) continue;
    const int64_t end = std::min(e.first + e.count, share.end);
    for (int64_t pair = std::max(e.first, share.begin); pair < end; ++pair) {
      const int64_t t = plan_.tokens()[pair];
      const int64_t row = e.row + pair - e.first;
      copy_to_blocks(work_.x.data() + t * stride, stride, work_.gathered.data(), row);
      std::copy_n(as<float>(work_.x_scale) + t * groups, groups,
                  as<float>(work_.gathered_scale) + row * groups);
      std::copy_n(as<int32_t>(work_.x_sum) + t * groups, groups,
                  as<int32_t>(work_.gathered_sum) + row * groups);
    }
  }
}

// The A rows of an expert's tokens: gathered for a tile kernel, by index for a vector kernel.
ActRows ForwardJob::x_rows(const ExpertRows& e) const {
  const auto [columns, groups, stride] = x_shape_;
  if (e.tile)
    return {work_.gathered.data() + e.row * stride,
            stride,
            as<float>(work_.gathered_scale) + e.row * groups,
            as<int32_t>(work_.gathered_sum) + e.row * groups,
            groups,
            nullptr};
  return {work_.x.data(),           stride, as<float>(work_.x_scale),
          as<int32_t>(work_.x_sum), groups, plan_.tokens() + e.first};
}

ActRows ForwardJob::h_rows(int pool, int64_t row) const {
  const auto p = size_t(pool);
  const auto [columns, groups, stride] = shape_of(layer_->pools[p].down);
  return {work_.h[p].data() + row * stride,
          stride,
          as<float>(work_.h_scale[p]) + row * groups,
          as<int32_t>(work_.h_sum[p]) + row * groups,
          groups,
          nullptr};
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
  // Integer formats: float32 rows of all of I, so that a row's scale can be found; float
  // formats: the pool's own A rows.
  const bool floats = kernels_.quantise_h;
  const int64_t element = floats ? 4 : kernels_.act_bytes;
  const int64_t h_stride = floats ? round_up(config_.intermediate_size, kTileRows) * element
                                  : shape_of(part.down).stride;
  uint8_t* h =
      floats ? work_.h_float.data() + part.begin * element : work_.h[size_t(w.pool)].data();

  int64_t cost = 0;  // of the tiles before
  for (int64_t i = 0; i < plan_.active() && cost < share.end; ++i) {
    const ExpertRows& e = plan_.expert(i);
    const int64_t each = tile_cost(e.count);
    // A tile belongs to the thread in whose share its cost begins.
    const int64_t first = std::clamp<int64_t>(ceil_div(share.begin - cost, each), 0, tiles);
    const int64_t last = std::clamp<int64_t>(ceil_div(share.end - cost, each), 0, tiles);
    cost += tiles * each;
    if (first >= last) continue;
    const TileProduct product = e.tile ? kernels_.tile : kernels_.vector;
    const uint8_t* weights = layer_->expert(w.pool, e.slot);
    const float* gate_bias = layer_->bias(layer_->gate_bias, e.slot);
    const float* up_bias = layer_->bias(layer_->up_bias, e.slot);
    const ActRows all = x_rows(e);
    // Float formats for a tile kernel: the 32 columns are one chunk of a block of rows.
    const bool blocked = e.tile && !floats;
    const int64_t row_stride = blocked ? kChunkBytes : h_stride;
    for (int64_t tile = first; tile < last; ++tile) {
      const uint8_t* gate_tile = weights + 2 * tile * tile_bytes;
      const int64_t column = part.begin + tile * kTileRows;
      const int64_t valid = std::min(kTileRows, part.size - tile * kTileRows);
      const int64_t at = tile * (blocked ? kBlockRows * kChunkBytes : kTileRows * element);
      for (int64_t r = 0; r < e.count; r += kRowBlock) {
        const int64_t m = std::min(kRowBlock, e.count - r);
        const ActRows a = all.from(r);
        product(gate_tile, part.up, a, m, gate);
        product(gate_tile + tile_bytes, part.up, a, m, up);
        const int64_t rows = blocked ? kBlockRows : m;
        for (int64_t b = 0; b < m; b += rows) {
          const int64_t n = std::min(rows, m - b);
          uint8_t* dst = h + (e.row + r + b) * h_stride + at;
          kernels_.swiglu(
              gate + b * kTileRows, up + b * kTileRows, gate_bias ? gate_bias + column : nullptr,
              up_bias ? up_bias + column : nullptr, config_.activation, n, dst, row_stride);
          // Columns past I: an infinity in x times their zero weights is NaN, which must not reach
          // the down product.
          if (valid < kTileRows)
            for (int64_t row = 0; row < n; ++row)
              std::memset(dst + row * row_stride + valid * element, 0,
                          size_t((kTileRows - valid) * element));
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
    for (int64_t pair = std::max(e.first, share.begin); pair < end; ++pair) {
      const int64_t at = e.row + pair - e.first;
      const float* row = as<float>(work_.h_float) + at * all_columns;
      const float absmax =
          whole || c.group ? -1 : c.table->absmax(row, DType::kFP32, c.intermediate_size);
      const ActRows a = h_rows(w.pool, at);
      uint8_t* dst = e.tile ? work_.thread_row(w.rank) : const_cast<uint8_t*>(a.data);
      kernels_.quantise(row + part.begin, DType::kFP32, part.size, part.down.cols_padded(), c.group,
                        absmax, dst, const_cast<float*>(a.scale), const_cast<int32_t*>(a.sum));
      if (e.tile) copy_to_blocks(dst, a.stride, work_.h[size_t(w.pool)].data(), at);
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
    const TileProduct product = e.tile ? kernels_.tile : kernels_.vector;
    const uint8_t* weights = layer_->expert(w.pool, e.slot) + 2 * part.up.bytes();
    // The bias counts once, so the pool that holds the first part of I adds it.
    const float* bias = part.begin == 0 ? layer_->bias(layer_->down_bias, e.slot) : nullptr;
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      for (int64_t r = 0; r < e.count; r += kRowBlock) {
        const int64_t m = std::min(kRowBlock, e.count - r);
        product(weights + tile * part.down.tile_bytes(), part.down, h_rows(w.pool, e.row + r), m,
                out);
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
