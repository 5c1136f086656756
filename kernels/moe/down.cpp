// The down product of a forward pass, and the sums over experts.
#include <algorithm>

#include "forward_pass.h"

namespace kt {

// Tasks (item, tile).
void ForwardPass::down_by_expert() {
  const int64_t tiles = part().size ? part().layout[kDown].tiles() : 0;
  const int64_t n = tiles * plan_->items();
  int64_t total = 0;
  for (int64_t i = 0; i < plan_->items(); ++i) total += tiles * tile_cost(plan_->item(i), kDown);
  sys::TaskSplit split(total, worker_.pool_threads, starts());
  for (int64_t i = 0; n && i < plan_->items(); ++i)
    split.add(tiles, tile_cost(plan_->item(i), kDown));
  split.end();

  sys::TaskPhase tasks = pool_tasks();
  const int64_t most = tiles_at_once(part().layout[kDown].tile_bytes());
  for (sys::TaskRange r; !(r = tasks.claim(most)).empty();)
    each_segment(r, tiles, [&](int64_t item, int64_t first, int64_t last) {
      down_of_expert(plan_->expert(plan_->item(item).expert), first, last);
    });
  end(Phase::kDown, tasks);
}

// An expert's products with the tiles [first, last), by blocks of rows: keep(row, rows, tile) takes
// each from the scratch, where a GEMM kernel may write past the rows.
template <class F>
void ForwardPass::down_products(const ExpertRows& e, const ActRows& h, int64_t first, int64_t last,
                                F keep) {
  const MatrixLayout& layout = part().layout[kDown];
  const uint8_t* weights = layer_.expert(worker_.pool, e.slot) + part().down_begin();
  TileProduct& product = rows_.kernel(e, kDown).product;
  const int64_t block = even_part(e.count, row_block());
  for (int64_t r = 0; r < e.count; r += block) {
    const int64_t m = std::min(block, e.count - r);
    for (int64_t tile = first; tile < last; ++tile) {
      product(weights + tile * layout.tile_bytes(), layout, h.from(r), m, space_.scratch);
      keep(r, m, tile);
    }
  }
}

void ForwardPass::down_of_expert(const ExpertRows& e, int64_t first, int64_t last) {
  down_products(e, h_for_down(e), first, last, [&](int64_t r, int64_t m, int64_t tile) {
    std::copy_n(space_.scratch, m * kTileRows, results_of(worker_.pool, e, tile) + r * kTileRows);
  });
}

// Whole rows are quantised here, for the experts that this thread has tiles of: a few rows, and no
// barrier.
ActRows ForwardPass::h_for_down(const ExpertRows& e) {
  if (!whole_rows(e)) return rows_.h(worker_.pool, e);
  const ActRows own = rows_.own_h(worker_.pool, space_);
  if (own_h_ != &e)
    for (int64_t row = 0; row < e.count; ++row) quantise_h_row(e, own, row);
  own_h_ = &e;
  return own;
}

// Tasks (block of tiles, group, tile of the block): a thread that has several groups of a tile has
// them in succession, and their sums in its cache.
void ForwardPass::down_by_group() {
  const int64_t tiles = part().size ? part().layout[kDown].tiles() : 0;
  // A thread takes a block at once where it can: its tiles share the reads of the h rows.
  const int64_t block = std::clamp<int64_t>(ceil_div(tiles, 2 * worker_.pool_threads), 4, 16);
  const int64_t blocks = ceil_div(tiles, block), groups = plan_->groups();
  int sums = 0;
  for (const PoolPart& p : layer_.pools) sums += p.size ? int(groups) : 0;
  int64_t total = 0;
  for (int64_t g = 0; g < groups; ++g) total += blocks * block * plan_->group(g).pairs;
  sys::TaskSplit split(total, worker_.pool_threads, starts());
  for (int64_t i = 0; i < blocks * groups; ++i) split.add(block, plan_->group(i % groups).pairs);
  split.end();

  sys::TaskPhase tasks = pool_tasks();
  for (sys::TaskRange r; !(r = tasks.claim(block)).empty();)
    each_segment(r, block, [&](int64_t segment, int64_t first, int64_t last) {
      const int64_t tile = segment / groups * block;
      down_of_group(segment % groups, tile + first, std::min(tile + last, tiles));
      for (int64_t t = tile + first; t < std::min(tile + last, tiles); ++t) sum_done(t, sums);
    });
  end(Phase::kDown, tasks);
}

void ForwardPass::down_of_group(int64_t group, int64_t first, int64_t last) {
  for (int64_t tile = first; tile < last; ++tile)
    std::fill_n(sum_of(worker_.pool, group, tile), count_ * kTileRows, 0.0f);
  for (int64_t i = plan_->group(group).first; i < plan_->group(group).last; ++i) {
    const ExpertRows& e = plan_->expert(i);
    const ActRows h = rows_.h(worker_.pool, e);
    down_products(e, h, first, last, [&](int64_t r, int64_t m, int64_t tile) {
      add_rows(worker_.pool, e, r, m, tile, space_.scratch, sum_of(worker_.pool, group, tile));
    });
  }
}

// Whoever completes the last of a tile's sums finishes it, while they are in a cache.
void ForwardPass::sum_done(int64_t tile, int sums) {
  std::atomic<int>& done = work_.sums_done[size_t(tile)];
  // acq_rel: the last one sees what the others wrote. Nobody looks at it again in this chunk.
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != sums) return;
  done.store(0, std::memory_order_relaxed);
  finish_tile(tile);
}

// Adds the weighted results of rows [first, first + m) of an expert to a tile's sums of their
// tokens.
void ForwardPass::add_rows(int pool, const ExpertRows& e, int64_t first, int64_t m, int64_t tile,
                           const float* results, float* sum) const {
  // The bias counts once, so the pool that holds the first part of I adds it.
  const float* bias =
      layer_.pools[size_t(pool)].begin == 0 ? layer_.bias_of(kDown, e.slot) : nullptr;
  config_.table->merge(results, bias ? bias + tile * kTileRows : nullptr,
                       plan_->weights() + e.first + first, plan_->tokens() + e.first + first, m,
                       sum);
}

// Of few pairs.
void ForwardPass::finish() {
  sys::TaskPhase tasks = team_tasks(ceil_div(config_.hidden_size, kTileRows));
  for (sys::TaskRange r; !(r = tasks.claim(4)).empty();)
    for (int64_t tile = r.first; tile < r.last; ++tile) finish_tile(tile);
  end(Phase::kFinish, tasks);
}

void ForwardPass::finish_tile(int64_t tile) {
  const float* sum[kMaxPools * kMaxGroups];
  int sums = 0;
  for (int p = 0; p < int(layer_.pools.size()); ++p) {
    if (!layer_.pools[size_t(p)].size) continue;
    for (int64_t g = 0; g < plan_->groups(); ++g) {
      if (plan_->few()) sum_pairs(p, g, tile);
      sum[sums++] = sum_of(p, g, tile);
    }
  }
  const DType dtype = args_.partial ? DType::kFP32 : args_.dtype;
  auto* out =
      args_.partial ? reinterpret_cast<uint8_t*>(args_.partial) : static_cast<uint8_t*>(args_.out);
  const int64_t column = tile * kTileRows, n = std::min(kTileRows, config_.hidden_size - column);
  for (int64_t t = 0; t < count_; ++t) {
    const int64_t at = (first_ + t) * config_.hidden_size + column;
    config_.table->finish(sum, sums, args_.add ? args_.add + at : nullptr, n,
                          out + at * dtype_bytes(dtype), dtype);
    for (int i = 0; i < sums; ++i) sum[i] += kTileRows;
  }
}

// What down_of_group does with the results as they come, in the same order.
void ForwardPass::sum_pairs(int pool, int64_t group, int64_t tile) {
  float* sum = sum_of(pool, group, tile);
  std::fill_n(sum, count_ * kTileRows, 0.0f);
  for (int64_t i = plan_->group(group).first; i < plan_->group(group).last; ++i) {
    const ExpertRows& e = plan_->expert(i);
    add_rows(pool, e, 0, e.count, tile, results_of(pool, e, tile), sum);
  }
}

float* ForwardPass::sum_of(int pool, int64_t group, int64_t tile) const {
  return as<float>(work_.sum[size_t(pool)]) + (tile * plan_->groups() + group) * count_ * kTileRows;
}

// Contiguous over an expert's tiles: a thread writes one stream next to the one of weights that it
// reads (with a stride between tiles the writes took 8% of a decode step).
float* ForwardPass::results_of(int pool, const ExpertRows& e, int64_t tile) const {
  const int64_t tiles = ceil_div(config_.hidden_size, kTileRows);
  return as<float>(work_.results[size_t(pool)]) + (e.first * tiles + e.count * tile) * kTileRows;
}

}  // namespace kt
