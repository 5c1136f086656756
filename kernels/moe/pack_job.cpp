#include "pack_job.h"

#include <algorithm>
#include <tuple>
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

PackJob::Tile PackJob::tile(const PoolPart& part, int pool, int64_t i) const {
  const LayerConfig& c = layer_->config;
  const int64_t pairs = 2 * part.layout[kUp].tiles();
  const Matrix m = i >= pairs ? kDown : i % 2 ? kUp : kGate;
  const bool down = m == kDown;
  const int64_t number = down ? i - pairs : i / 2;
  return {m,
          part.layout[m],
          {source_.weights[m], down ? c.intermediate_size : c.hidden_size, down ? 0 : part.begin,
           down ? part.begin : 0},
          number,
          layer_->expert(pool, slot_) + part.begin_of(m) + number * part.stride_of(m)};
}

void PackJob::run(sys::Worker& w) noexcept {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  const int64_t all = part.size ? 2 * part.layout[kUp].tiles() + part.layout[kDown].tiles() : 0;
  const int64_t begin = all * w.index / w.pool_threads, end = all * (w.index + 1) / w.pool_threads;
  Finding& found = findings_[size_t(w.rank)];
  for (int64_t i = begin; i < end && found.error == PackError::kNone; ++i) {
    const Tile t = tile(part, w.pool, i);
    found.matrix = t.matrix;
    found.error = check_tile(t.layout, t.source, t.number, &found.row);
  }
  w.team_barrier();  // every thread sees all findings
  for (const Finding& any : findings_)
    if (any.error != PackError::kNone) return;
  for (int64_t i = begin; i < end; ++i) {
    const Tile t = tile(part, w.pool, i);
    pack_tile(t.layout, t.source, t.number, scratch_[size_t(w.rank)].data(), t.dst);
  }
  if (w.rank == 0) keep_biases();
}

void PackJob::keep_biases() {
  for (int m = 0; m < kMatrices; ++m) {
    BiasTable& table = layer_->bias[m];
    const float* bias = source_.bias[m];
    if (!bias && !table.any) continue;
    float* row = table.row(layer_->position[size_t(slot_)]);
    if (bias)
      std::copy_n(bias, table.width, row);
    else
      std::fill_n(row, table.width, 0.0f);
    table.any = true;
  }
}

std::string PackJob::problem() const {
  const Finding* first = nullptr;
  for (const Finding& f : findings_)
    if (f.error != PackError::kNone &&
        (!first || std::tie(f.matrix, f.row) < std::tie(first->matrix, first->row)))
      first = &f;
  if (!first) return "";
  const char* const names[] = {"gate", "up", "down"};
  const std::string row = is_of_a_row(first->error) ? " row " + std::to_string(first->row) : "";
  return names[first->matrix] + row + ": " + describe(first->error);
}

}  // namespace kt
