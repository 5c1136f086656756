#include "pass.h"

#include <algorithm>

namespace kt {

TrainingPass::TrainingPass(TrainingState& state, sys::Worker& worker, const TrainingInput& in)
    : state_(state),
      layer_(*state.layer),
      config_(layer_.config),
      table_(*config_.table),
      training_(*table_.training),
      lora_(state.lora),
      work_(*layer_.workspace),
      space_(*state.space),
      worker_(worker),
      mine_(space_.thread[size_t(worker.thread)]),
      pass_(layer_, worker),
      h_(pass_),
      in_(in),
      batch_{in.x, DType::kBF16, in.tokens, in.ids, in.weights, nullptr, nullptr, nullptr} {}

void TrainingPass::take_x(float* kept) {
  const bool gathers = in_.base && x_->gathers(plan());
  each_part([&](const ExpertRows& e, int64_t begin, int64_t end) {
    note_pairs(e, begin, end);
    if (gathers) x_->gather(plan(), e, e.first + begin, e.first + end);
    for (int64_t r = begin; r < end; ++r) {
      // Without dropout gate and up have the same rows.
      if (!shares_rows(e, kGate) || !shares_rows(e, kUp)) put_adapter_x(e, kGate, r);
      if (in_.dropout) put_adapter_x(e, kUp, r);
    }
    for (Matrix m : {kGate, kUp}) a_of_x(e, m, begin, end, kept);
  });
}

void TrainingPass::put_adapter_x(const ExpertRows& e, Matrix m, int64_t r) {
  const int64_t h = config_.hidden_size, token = first_ + plan().tokens()[e.first + r];
  const uint16_t* x = in_.x + token * h;
  const BF16Rows to = rows_in(space_.x[m], h);
  const int64_t at = row(e) + r;
  if (!in_.dropout) return to.put_row(table_, at, x, DType::kBF16, h);
  table_.quantise[int(ActKind::kFloat)](x, DType::kBF16, h, round_up(h, kTileRows), -1,
                                        reinterpret_cast<uint8_t*>(mine_.row), nullptr, nullptr);
  training_.drop(drop_key(m, e.slot), uint32_t(token), 0, h, mine_.row);
  to.put_row(table_, at, mine_.row, DType::kFP32, h);
}

DropKey TrainingPass::drop_key(Matrix m, int64_t slot) const {
  const double p = state_.config.dropout;
  return {in_.seed, uint32_t(p * 0x1p32), float(1 / (1 - p)), uint32_t(slot), uint32_t(m)};
}

void TrainingPass::drop_tile(Matrix m, const ExpertRows& e, int64_t first, int64_t count,
                             int64_t column, float* values) const {
  if (!in_.dropout) return;
  const DropKey key = drop_key(m, e.slot);
  for (int64_t r = 0; r < count; ++r)
    training_.drop(key, uint32_t(first_ + plan().tokens()[e.first + first + r]), column, kTileRows,
                   values + r * kTileRows);
}

void TrainingPass::a_of_x(const ExpertRows& e, Matrix m, int64_t begin, int64_t end, float* kept) {
  const int64_t padded = lora_.rank_padded();
  const ActRows x = adapter_x(e, m);
  for (int64_t tile = 0; tile < rank_tiles(); ++tile)
    row_blocks(begin, end, [&](int64_t r, int64_t count) {
      float* values = mine_.tile[0];
      adapter_product(m, kLoraA, e.slot, tile, x.from(r), count, values);
      for (int64_t i = 0; i < count; ++i) {
        float* one = rank_values(m, e) + (r + i) * padded + tile * kTileRows;
        for (int64_t n = 0; n < kTileRows; ++n)
          one[n] = state_.config.scaling * values[i * kTileRows + n];
        if (kept)
          std::copy_n(one, valid_rank(tile), kept_ranks(kept, e, r + i, m) + tile * kTileRows);
        rank_rows(m).put(table_, row(e) + r + i, tile, one, DType::kFP32, kTileRows);
      }
    });
}

void TrainingPass::keep_gate_up(uint16_t* memory, int64_t pairs_before, const ExpertRows& e,
                                int64_t tile, int64_t first, int64_t m, const float* gate,
                                const float* up) const {
  const float* values[2] = {gate, up};
  for (int half = 0; half < 2; ++half) {
    uint16_t* to = memory + saved_tile(pairs_before, e, inter_tiles(), tile, half);
    table_.quantise[int(ActKind::kBF16)](values[half], DType::kFP32, m * kTileRows, m * kTileRows,
                                         -1, reinterpret_cast<uint8_t*>(to + first * kTileRows),
                                         nullptr, nullptr);
  }
}

void TrainingPass::rank_of_h(const WorkItem& item, int64_t tile, const ActRows& rows) {
  const ExpertRows& e = plan().expert(item.expert);
  row_blocks(item.first, item.last, [&](int64_t r, int64_t count) {
    float* values = mine_.tile[0];
    adapter_product(kDown, kLoraA, e.slot, tile, rows.from(r), count, values);
    keep_rank_part(e, kDown, r, count, tile, values);
  });
}

void TrainingPass::keep_rank_part(const ExpertRows& e, Matrix matrix, int64_t first, int64_t m,
                                  int64_t tile, const float* values) const {
  const int64_t padded = lora_.rank_padded();
  float* to = rank_part(worker_.pool, matrix, e) + first * padded + tile * kTileRows;
  for (int64_t i = 0; i < m; ++i, to += padded, values += kTileRows)
    std::copy_n(values, kTileRows, to);
}

void TrainingPass::sum_rank_parts(Matrix m, const ExpertRows& e, int64_t row, float* sum) const {
  const int64_t padded = lora_.rank_padded();
  std::fill_n(sum, padded, 0.0f);
  for (int p = 0; p < int(layer_.pools.size()); ++p) {
    if (!layer_.pools[size_t(p)].size) continue;
    const float* values = rank_part(p, m, e) + row * padded;
    for (int64_t i = 0; i < padded; ++i) sum[i] += values[i];
  }
  for (int64_t i = 0; i < padded; ++i) sum[i] *= state_.config.scaling;
}

void TrainingPass::finish_sums(uint16_t* out) {
  ForwardArgs args = batch_;
  args.out = out;
  const Chunk chunk{args, first_, count_, false};
  team_phase(hidden_tiles(), [&](int64_t tile) { finish_tile(layer_, plan(), chunk, tile); });
}

void TrainingPass::add_pairs(bool weighted, uint16_t* out) {
  const int64_t h = config_.hidden_size, k = config_.top_k;
  const auto add = [&](int64_t token) {
    int64_t count = 0;
    for (int64_t route = token * k; route < (token + 1) * k; ++route)
      if (in_.computes(in_.ids[first_ * k + route]))
        mine_.pairs[count++] = space_.pair[size_t(route)];
    std::sort(mine_.pairs, mine_.pairs + count);  // by expert
    int end[kMaxPools * kMaxGroups], sums = 0, n = 0;
    for (int p = 0; p < int(layer_.pools.size()); ++p)
      for (int64_t g = 0, i = 0; layer_.pools[size_t(p)].size && g < plan().groups(); ++g) {
        const ExpertRows& last = plan().expert(plan().group(g).last - 1);
        for (; i < count && mine_.pairs[i] < last.first + last.count; ++i) {
          const int32_t pair = mine_.pairs[i];
          mine_.parts[n++] = {by_pair(p, kGate, pair), weighted ? plan().weights()[pair] : 1};
        }
        end[sums++] = n;
      }
    training_.sum_rows(mine_.parts, end, sums, h, out + (first_ + token) * h);
  };
  team_phase(ceil_div(count_, kRowTask), [&](int64_t task) {
    for (int64_t t = task * kRowTask; t < std::min((task + 1) * kRowTask, count_); ++t) add(t);
  });
}

}  // namespace kt
