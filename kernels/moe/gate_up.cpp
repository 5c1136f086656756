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
  const int64_t tiles = part().layout[kUp].tiles();
  const auto each_item = [&](auto f) {
    for (int64_t i = 0; tiles && i < plan_->items(); ++i) f(plan_->item(i));
  };
  int64_t total = 0;
  each_item([&](const WorkItem& item) { total += tiles * tile_cost(item, kGate); });
  sys::TaskSplit split(total, worker_.pool_threads, starts());
  each_item([&](const WorkItem& item) { split.add(tiles, tile_cost(item, kGate)); });
  split.end();

  sys::TaskPhase tasks = pool_tasks();
  const int64_t most = tiles_at_once(part().pair_bytes());
  for (sys::TaskRange r; !(r = tasks.claim(most)).empty();)
    each_segment(r, tiles, [&](int64_t item, int64_t first, int64_t last) {
      gate_up_tiles(plan_->item(item), first, last);
    });
  end(Phase::kGateUp, tasks);
}

// Cost of one tile: below some number of rows reading the weights is what takes the time.
int64_t ForwardPass::tile_cost(const WorkItem& item, Matrix m) const {
  return std::max<int64_t>(item.rows(), plan_->expert(item.expert).gemm[m] ? 32 : 8);
}

// The A rows of an item stay in the second-level cache from one tile to the next.
void ForwardPass::gate_up_tiles(const WorkItem& item, int64_t first, int64_t last) {
  const ExpertRows& e = plan_->expert(item.expert);
  const MatrixLayout &gate_layout = part().layout[kGate], &up_layout = part().layout[kUp];
  TileProduct& gate_product = rows_.kernel(e, kGate).product;
  TileProduct& up_product = rows_.kernel(e, kUp).product;
  const uint8_t* weights = layer_.expert(worker_.pool, e.slot);
  const float* gate_bias = layer_.bias_of(kGate, e.slot);
  const float* up_bias = layer_.bias_of(kUp, e.slot);
  const ActRows gate_rows = x_rows(e, kGate), up_rows = x_rows(e, kUp);
  float* gate = space_.scratch;
  float* up = gate + (kRowBlock + kRowSlack) * kTileRows;
  const int64_t block = even_part(item.rows(), row_block());
  for (int64_t tile = first; tile < last; ++tile) {
    const uint8_t* gate_tile = weights + tile * part().pair_bytes();
    const int64_t column = part().begin + tile * kTileRows;
    for (int64_t r = item.first; r < item.last; r += block) {
      const int64_t m = std::min(block, item.last - r);
      gate_product(gate_tile, gate_layout, gate_rows.from(r), m, gate);
      up_product(gate_tile + gate_layout.tile_bytes(), up_layout, up_rows.from(r), m, up);
      config_.table->swiglu(gate, up, gate_bias ? gate_bias + column : nullptr,
                            up_bias ? up_bias + column : nullptr, config_.activation, m, gate);
      keep_h(e, gate, r, m, tile);
    }
  }
}

// The expert's x rows: by index, or gathered.
ActRows ForwardPass::x_rows(const ExpertRows& e, Matrix m) const {
  if (rows_.gathers(e, m)) return rows_.gathered(e, m);
  ActRows x = x_of_tokens(m);
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
  const int64_t tiles =
      tile + 1 < p.layout[kUp].tiles() ? 1 : p.layout[kDown].cols_padded() / kTileRows - tile;
  for (int64_t r = 0; r < m; ++r) {
    const float* row = values + r * kTileRows;
    rows_.quantise_tile(h, rows_.kernel(e, kDown), row, first + r, tile, valid);
    for (int64_t pad = 1; pad < tiles; ++pad)
      rows_.quantise_tile(h, rows_.kernel(e, kDown), row, first + r, tile + pad, 0);
  }
}

void ForwardPass::quantise_h_row(const ExpertRows& e, const ActRows& h, int64_t row) {
  rows_.quantise_whole_row(worker_.pool, rows_.kernel(e, kDown), rows_.h_float(e.row + row), h, row,
                           space_.row);
}

}  // namespace kt
