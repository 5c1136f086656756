#include "pack_job.h"

#include <algorithm>
#include <utility>

namespace kt {

PackJob::PackJob(std::shared_ptr<LayerState> layer, int64_t slot, const ExpertSource& source,
                 int threads)
    : layer_(std::move(layer)), slot_(slot), source_(source), findings_(size_t(threads)) {
  int64_t floats = 0;
  for (const PoolPart& part : layer_->pools)
    for (const MatrixLayout& layout : part.layout) floats = std::max(floats, pack_scratch(layout));
  scratch_.assign(size_t(threads), std::vector<float>(size_t(floats)));
}

MatrixSource PackJob::source_of(const PoolPart& part, Matrix m) const {
  const LayerConfig& c = layer_->config;
  if (m == kDown) return {source_.weights[m], c.intermediate_size, 0, part.begin};
  return {source_.weights[m], c.hidden_size, part.begin, 0};
}

void PackJob::run(sys::Worker& w) noexcept {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  const int64_t all = part.tiles();
  const int64_t begin = all * w.index / w.pool_threads, end = all * (w.index + 1) / w.pool_threads;
  Finding& found = findings_[size_t(w.rank)];
  for (int64_t i = begin; i < end && found.error == PackError::kNone; ++i) {
    const PoolPart::Tile t = part.tile(i);
    found.matrix = t.matrix;
    found.error =
        check_tile(part.layout[t.matrix], source_of(part, t.matrix), t.number, &found.row);
  }
  w.team_barrier();  // every thread sees all findings
  for (const Finding& any : findings_)
    if (any.error != PackError::kNone) return;
  for (int64_t i = begin; i < end; ++i) {
    const PoolPart::Tile t = part.tile(i);
    pack_tile(part.layout[t.matrix], source_of(part, t.matrix), t.number,
              scratch_[size_t(w.rank)].data(), layer_->expert(w.pool, slot_) + t.at);
  }
  if (w.rank == 0) layer_->keep_rest(slot_, source_.bias, source_.order);
}

}  // namespace kt
