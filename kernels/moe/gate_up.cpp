// The gate and up products of a forward pass.
#include <algorithm>

#include "forward_pass.h"

namespace kt {
namespace {

constexpr int64_t kTaskBytes = 64 << 10;  // decode: weights that a thread takes at a time

}  // namespace

int64_t ForwardPass::tiles_at_once(int64_t tile_bytes) const {
  if (!plan_->few()) return 1;
  const int64_t bytes = config_.tuning.task_bytes ? config_.tuning.task_bytes : kTaskBytes;
  return std::max<int64_t>(1, bytes / std::max<int64_t>(tile_bytes, 1));
}

void ForwardPass::gate_up() {
  const int64_t tiles = part().up.tiles();
  const auto each_item = [&](auto f) {
    for (int64_t i = 0; tiles && i < plan_->items(); ++i) f(plan_->item(i));
  };
  int64_t total = 0;
  each_item([&](const WorkItem& item) { total += tiles * tile_cost(item); });
  sys::TaskSplit split(total, worker_.pool_threads, starts());
  each_item([&](const WorkItem& item) { split.add(tiles, tile_cost(item)); });
  split.end();

  sys::TaskPhase tasks = pool_tasks();
  const int64_t most = tiles_at_once(2 * part().up.tile_bytes());
  for (sys::TaskRange r; !(r = tasks.claim(most)).empty();)
    each_segment(r, tiles, [&](int64_t item, int64_t first, int64_t last) {
      gate_up_tiles(plan_->item(item), first, last);
    });
  end(Phase::kGateUp, tasks);
}

// Cost of one tile: below some number of rows reading the weights is what takes the time.
int64_t ForwardPass::tile_cost(const WorkItem& item) const {
  return std::max<int64_t>(item.rows(), plan_->expert(item.expert).gemm ? 32 : 8);
}

// The A rows of an item stay in the second-level cache from one tile to the next.
void ForwardPass::gate_up_tiles(const WorkItem& item, int64_t first, int64_t last) {
  const ExpertRows& e = plan_->expert(item.expert);
  const MatrixLayout& layout = part().up;
  const TileProduct product = rows_.kernel(e).product;
  const uint8_t* weights = layer_.expert(worker_.pool, e.slot);
  const float* gate_bias = layer_.bias(layer_.gate_bias, e.slot);
  const float* up_bias = layer_.bias(layer_.up_bias, e.slot);
  const ActRows all = x_rows(e);
  float* gate = space_.scratch;
  float* up = gate + (kRowBlock + kRowSlack) * kTileRows;
  const int64_t block = even_part(item.rows(), row_block());
  for (int64_t tile = first; tile < last; ++tile) {
    const uint8_t* gate_tile = weights + 2 * tile * layout.tile_bytes();
    const int64_t column = part().begin + tile * kTileRows;
    for (int64_t r = item.first; r < item.last; r += block) {
      const int64_t m = std::min(block, item.last - r);
      const ActRows a = all.from(r);
      product(gate_tile, layout, a, m, gate);
      product(gate_tile + layout.tile_bytes(), layout, a, m, up);
      config_.table->swiglu(gate, up, gate_bias ? gate_bias + column : nullptr,
                            up_bias ? up_bias + column : nullptr, config_.activation, m, gate);
      keep_h(e, gate, r, m, tile);
    }
  }
}

// The expert's x rows: by index, or gathered.
ActRows ForwardPass::x_rows(const ExpertRows& e) const {
  if (e.gemm && rows_.gathers()) return rows_.gathered(e);
  ActRows x = x_of_tokens();
  x.index = plan_->tokens() + e.first;
  return x;
}

// A tile of h, rows [first, first + m) of the expert.
void ForwardPass::keep_h(const ExpertRows& e, const float* values, int64_t first, int64_t m,
                         int64_t tile) {
  const PoolPart& p = part();
  // Columns past I: an infinity in x times their zero weights is NaN, which must not reach the
  // down product.
  const int64_t valid = std::min(kTileRows, p.size - tile * kTileRows);
  if (whole_rows(e)) {  // kept as float32 until all of the row is there
    float* to = rows_.h_float(e.row + first) + p.begin + tile * kTileRows;
    for (int64_t r = 0; r < m; ++r, values += kTileRows, to += rows_.h_float_stride())
      std::copy_n(values, valid, to);
    return;
  }
  const ActRows h = rows_.h(worker_.pool, e);
  const int64_t tiles = tile + 1 < p.up.tiles() ? 1 : p.down.cols_padded() / kTileRows - tile;
  for (int64_t r = 0; r < m; ++r) {
    const float* row = values + r * kTileRows;
    rows_.quantise_tile(h, rows_.kernel(e), row, first + r, tile, valid);
    for (int64_t pad = 1; pad < tiles; ++pad)
      rows_.quantise_tile(h, rows_.kernel(e), row, first + r, tile + pad, 0);
  }
}

void ForwardPass::quantise_h_row(const ExpertRows& e, const ActRows& h, int64_t row) {
  rows_.quantise_whole_row(worker_.pool, rows_.kernel(e), rows_.h_float(e.row + row), h, row,
                           space_.row);
}

}  // namespace kt
