#include "weight_jobs.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../pack/packed.h"

namespace kt {
namespace {

std::string in_words(const Finding& f) {
  const std::string row = is_of_a_row(f.error) ? " row " + std::to_string(f.row) : "";
  return kMatrixNames[f.matrix] + row + ": " + describe(f.error);
}

// The earliest of the threads' first findings; null if there is none.
const Finding* first_of(const std::vector<Finding>& findings) {
  const Finding* first = nullptr;
  for (const Finding& f : findings)
    if (f.error != PackError::kNone && (!first || f.place() < first->place())) first = &f;
  return first;
}

}  // namespace

PackJob::PackJob(std::shared_ptr<LayerState> layer, const std::vector<SlotSource>& experts,
                 const sys::Team& team)
    : layer_(std::move(layer)),
      experts_(experts),
      tasks_(std::make_unique<Tasks[]>(size_t(team.pools()))),
      found_(size_t(team.threads())) {
  for (const SlotSource& expert : experts_) {
    check_first_ |= layer_->loaded[size_t(expert.slot)] != 0;
    for (const PoolPart& part : layer_->pools)
      for (Matrix m : layer_->config.matrices())
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

// Takes tiles in ascending order, so that every tile before a pool's first bad one is checked. The
// reported error therefore does not depend on timing.
template <class F> void PackJob::each(std::atomic<int64_t>& next, sys::Worker& w, F work) {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  const int64_t tiles = part.tiles(), all = tiles * int64_t(experts_.size());
  // relaxed: what the numbers refer to is older than the job.
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
    w.team_barrier();  // makes all findings visible to every thread
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

PackedLoad::PackedLoad(std::shared_ptr<LayerState> layer, int64_t slot,
                       const ByMatrix<const uint8_t*>& tiles, const ByMatrix<const float*>& bias,
                       int threads)
    : layer_(std::move(layer)),
      slot_(slot),
      tiles_(tiles),
      bias_(bias),
      findings_(size_t(threads)) {}

void PackedLoad::run(sys::Worker& w) noexcept {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  const int64_t all = part.tiles();
  Finding& found = findings_[size_t(w.rank)];
  for (int64_t i = all * w.index / w.pool_threads; i < all * (w.index + 1) / w.pool_threads; ++i) {
    const PoolPart::Tile t = part.tile(i);
    const MatrixLayout whole = layer_->config.layout(t.matrix);
    const bool down = t.matrix == kDown;
    const int64_t number = down ? t.number : part.begin / kTileRows + t.number;
    const PackedColumns from(whole, tiles_[t.matrix] + number * whole.tile_bytes(),
                             down ? part.begin : 0, part.layout[t.matrix]);
    int64_t lane = 0;
    found.error = take_columns(from, layer_->expert(w.pool, slot_) + t.at, &lane);
    found.matrix = t.matrix;
    found.row = number * kTileRows + lane;
    if (found.error != PackError::kNone) return;
  }
  if (w.rank == 0) layer_->keep_rest(slot_, bias_, {});
}

std::string PackedLoad::problem() const {
  const Finding* first = first_of(findings_);
  return first ? in_words(*first) : "";
}

PackedSave::PackedSave(std::shared_ptr<LayerState> layer, int64_t slot, Matrix m, uint8_t* dst)
    : layer_(std::move(layer)), slot_(slot), matrix_(m), dst_(dst) {}

void PackedSave::run(sys::Worker& w) noexcept {
  const MatrixLayout whole = layer_->config.layout(matrix_);
  const bool down = matrix_ == kDown;
  const int64_t all = whole.tiles();
  for (int64_t tile = all * w.rank / w.team_threads; tile < all * (w.rank + 1) / w.team_threads;
       ++tile) {
    uint8_t* dst = dst_ + tile * whole.tile_bytes();
    std::memset(dst, 0, size_t(whole.head_bytes()));
    for (int p = 0; p < int(layer_->pools.size()); ++p) {
      const PoolPart& part = layer_->pools[size_t(p)];
      const int64_t number = down ? tile : tile - part.begin / kTileRows;
      if (!part.size || number < 0 || number >= part.layout[matrix_].tiles()) continue;
      const uint8_t* src = layer_->expert(p, slot_) + part.begin_of(matrix_);
      put_columns(part.layout[matrix_], src + number * part.stride_of(matrix_), whole,
                  down ? part.begin : 0, dst);
    }
  }
}

}  // namespace kt
