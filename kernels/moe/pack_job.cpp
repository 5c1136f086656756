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
    floats = std::max({floats, pack_scratch(part.up), pack_scratch(part.down)});
  scratch_.assign(size_t(threads), std::vector<float>(size_t(floats)));
}

PackJob::Tile PackJob::tile(const PoolPart& part, int pool, int64_t i) const {
  const LayerConfig& c = layer_->config;
  uint8_t* expert = layer_->expert(pool, slot_);
  const int64_t pairs = 2 * part.up.tiles();
  if (i < pairs) {
    const int matrix = int(i % 2);
    const WeightSource& weights = matrix ? source_.up : source_.gate;
    return {matrix,
            part.up,
            {weights, c.hidden_size, part.begin, 0},
            i / 2,
            expert + i * part.up.tile_bytes()};
  }
  return {2,
          part.down,
          {source_.down, c.intermediate_size, 0, part.begin},
          i - pairs,
          expert + 2 * part.up.bytes() + (i - pairs) * part.down.tile_bytes()};
}

void PackJob::run(sys::Worker& w) noexcept {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  const int64_t all = part.size ? 2 * part.up.tiles() + part.down.tiles() : 0;
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
  const auto keep = [&](BiasTable& table, const float* bias) {
    if (!bias && !table.any) return;
    float* row = table.row(layer_->position[size_t(slot_)]);
    if (bias)
      std::copy_n(bias, table.width, row);
    else
      std::fill_n(row, table.width, 0.0f);
    table.any = true;
  };
  keep(layer_->gate_bias, source_.gate_bias);
  keep(layer_->up_bias, source_.up_bias);
  keep(layer_->down_bias, source_.down_bias);
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
