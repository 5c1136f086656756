#include "plan.h"

#include <algorithm>
#include <atomic>

#include "kt/kernel_table.h"

namespace kt {
namespace {

bool wanted(const PlanInput& in, int64_t id) {
  return id >= 0 && id < int64_t(in.on_cpu.size()) && in.on_cpu[size_t(id)];
}

}  // namespace

bool more_pairs_than(int64_t most, const int64_t* ids, int64_t n, std::vector<uint8_t>& on_cpu) {
  if (n <= most) return false;
  int64_t pairs = 0;
  for (int64_t i = 0; i < n && pairs <= most; ++i)
    pairs += uint64_t(ids[i]) < on_cpu.size() &&
             std::atomic_ref(on_cpu[size_t(ids[i])]).load(std::memory_order_relaxed);
  return pairs > most;
}

// With about 128 tasks, threads finish at nearly the same time. Twice as many groups would cost 2%
// of a prefill.
int64_t expert_groups(int64_t num_experts, int64_t hidden) {
  constexpr int64_t kTasks = 128;
  const int64_t groups = ceil_div(kTasks, ceil_div(hidden, kTileRows));
  return std::min(std::clamp<int64_t>(groups, 1, kMaxGroups), num_experts);
}

Plan::Plan(int64_t max_experts, int64_t max_pairs)
    : experts_(size_t(std::min(max_experts, max_pairs))),
      item_(size_t(std::min(max_experts, max_pairs) + max_pairs / kItemRows)),
      group_(size_t(kMaxGroups)),
      next_(max_pairs > kFewIds ? size_t(max_experts) : 0),
      token_(size_t(max_pairs)),
      route_(size_t(max_pairs)),
      weight_(size_t(max_pairs)) {}

void Plan::build(const PlanInput& in) {
  pairs_ = active_ = items_ = groups_ = rows_ = 0;
  any_gemm_ = {};
  in.tokens* in.top_k <= kFewIds ? sort_few(in) : sort_many(in);
  add_items();
}

void Plan::sort_few(const PlanInput& in) {
  int64_t key[kFewIds];  // slot and position in ids
  int64_t n = 0;
  for (int64_t i = 0; i < in.tokens * in.top_k; ++i) {
    if (!wanted(in, in.ids[i])) continue;
    const int64_t one = in.ids[i] * kFewIds + i;
    int64_t at = n++;
    for (; at > 0 && key[at - 1] > one; --at) key[at] = key[at - 1];
    key[at] = one;
  }
  for (int64_t i = 0, end; i < n; i = end) {
    const int64_t slot = key[i] / kFewIds;
    for (end = i; end < n && key[end] / kFewIds == slot; ++end) {
      const int64_t place = key[end] % kFewIds;
      token_[size_t(end)] = int32_t(place / in.top_k);
      route_[size_t(end)] = int32_t(place);
      weight_[size_t(end)] = in.weights[place];
    }
    add_expert(in, slot, end - i);
  }
}

void Plan::sort_many(const PlanInput& in) {
  const auto num_experts = int64_t(in.on_cpu.size());
  std::fill_n(next_.begin(), num_experts, 0);
  for (int64_t i = 0; i < in.tokens * in.top_k; ++i)
    if (wanted(in, in.ids[i])) ++next_[size_t(in.ids[i])];
  for (int64_t slot = 0; slot < num_experts; ++slot) {
    const int64_t count = next_[size_t(slot)];
    next_[size_t(slot)] = pairs_;
    if (count) add_expert(in, slot, count);
  }
  for (int64_t i = 0; i < in.tokens * in.top_k; ++i) {
    if (!wanted(in, in.ids[i])) continue;
    const auto pair = size_t(next_[size_t(in.ids[i])]++);
    token_[pair] = int32_t(i / in.top_k);
    route_[pair] = int32_t(i);
    weight_[pair] = in.weights[i];
  }
}

// Must be called in ascending slot order.
void Plan::add_expert(const PlanInput& in, int64_t slot, int64_t count) {
  ExpertRows& e = experts_[size_t(active_)] = {slot, pairs_, count, rows_, {}};
  for (int m = 0; m < kMatrices; ++m) {
    e.gemm[size_t(m)] = count >= in.gemm_min_rows[size_t(m)];
    any_gemm_[size_t(m)] |= e.gemm[size_t(m)];
  }
  if (e.any_gemm()) e.row = round_up(rows_, kBlockRows);
  // The rows of a block spread over all of it, so blocks cannot be shared.
  rows_ = e.row + (e.any_gemm() ? round_up(count, kBlockRows) : count);

  // Group g has the slots from g * E / groups on.
  const auto num_experts = int64_t(in.on_cpu.size());
  const int64_t last = groups_ ? experts_[size_t(active_ - 1)].slot : 0;
  const auto number = [&](int64_t s) { return ((s + 1) * in.groups - 1) / num_experts; };
  if (!groups_ || number(slot) != number(last)) group_[size_t(groups_++)] = {active_, active_, 0};
  ++group_[size_t(groups_ - 1)].last;
  group_[size_t(groups_ - 1)].pairs += count;
  ++active_;
  pairs_ += count;
}

void Plan::add_items() {
  const bool few = pairs_ <= kFewPairs;
  for (int64_t i = 0; i < active_; ++i) {
    const int64_t count = expert(i).count, rows = few ? count : even_part(count, kItemRows);
    for (int64_t row = 0; row < count; row += rows)
      item_[size_t(items_++)] = {i, row, std::min(row + rows, count)};
  }
  if (few) return;
  std::sort(item_.begin(), item_.begin() + items_, [](const WorkItem& a, const WorkItem& b) {
    if (a.rows() != b.rows()) return a.rows() > b.rows();
    return a.expert != b.expert ? a.expert < b.expert : a.first < b.first;
  });
}

int64_t Plan::expert_of_pair(int64_t pair) const {
  const auto after = std::upper_bound(experts_.begin(), experts_.begin() + active_, pair,
                                      [](int64_t p, const ExpertRows& e) { return p < e.first; });
  return after - experts_.begin() - 1;
}

}  // namespace kt
