#include "pack_job.h"

#include <algorithm>
#include <utility>

namespace kt {

PackJob::PackJob(std::shared_ptr<LayerState> layer, const std::vector<SlotSource>& experts,
                 const sys::Team& team)
    : layer_(std::move(layer)),
      experts_(experts),
      tasks_(std::make_unique<Tasks[]>(size_t(team.pools()))),
      found_(size_t(team.threads())) {
  for (const SlotSource& expert : experts_) {
    check_first_ |= layer_->loaded[size_t(expert.slot)] != 0;
    for (const PoolPart& part : layer_->pools)
      for (int m = 0; m < kMatrices; ++m)
        floats_ = std::max(floats_, pack_scratch(part.layout[m], expert.source.weights[m]));
  }
  if (floats_) floats_ = round_up(floats_, 32) + 32;  // threads share no cache line
  scratch_ = std::make_unique_for_overwrite<float[]>(size_t(team.threads() * floats_));
}

MatrixSource PackJob::source_of(const SlotSource& expert, const PoolPart& part, Matrix m) const {
  const LayerConfig& c = layer_->config;
  const WeightSource& weights = expert.source.weights[m];
  if (m == kDown) return {weights, c.intermediate_size, 0, part.begin};
  return {weights, c.hidden_size, part.begin, 0};
}

// Ascending, so that every tile before a pool's first bad one is looked at: which error is reported
// depends on no timing.
template <class F> void PackJob::each(std::atomic<int64_t>& next, sys::Worker& w, F work) {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  const int64_t tiles = part.tiles(), all = tiles * int64_t(experts_.size());
  // relaxed: what the numbers stand for is as old as the job.
  for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < all;) {
    const SlotSource& expert = experts_[size_t(i / tiles)];
    const PoolPart::Tile t = part.tile(i % tiles);
    int64_t row = 0;
    const PackError error = work(part.layout[t.matrix], source_of(expert, part, t.matrix), t.number,
                                 layer_->expert(w.pool, expert.slot) + t.at, &row);
    if (error != PackError::kNone) {
      found_[size_t(w.rank)] = {error, i / tiles, t.matrix, row};
      return;
    }
  }
}

void PackJob::run(sys::Worker& w) noexcept {
  Tasks& tasks = tasks_[size_t(w.pool)];
  if (check_first_) {
    each(tasks.check, w,
         [](const MatrixLayout& layout, const MatrixSource& source, int64_t tile, uint8_t*,
            int64_t* row) { return check_tile(layout, source, tile, row); });
    w.team_barrier();  // every thread sees what all found
    if (first_of(found_)) return;
  }
  float* scratch = scratch_.get() + w.rank * floats_;
  each(tasks.pack, w,
       [&](const MatrixLayout& layout, const MatrixSource& source, int64_t tile, uint8_t* dst,
           int64_t* row) { return pack_tile(layout, source, tile, scratch, dst, row); });
  w.team_barrier();
  if (w.rank == 0 && !first_of(found_))
    for (const SlotSource& expert : experts_)
      layer_->keep_rest(expert.slot, expert.source.bias, expert.source.order);
}

std::string PackJob::problem() const {
  const Finding* first = first_of(found_);
  if (!first) return "";
  return "expert slot " + std::to_string(experts_[size_t(first->expert)].slot) + ", " +
         in_words(*first);
}

}  // namespace kt
