#include "plan.h"

#include <algorithm>

#include "kt/kernel_table.h"

namespace kt {

Plan::Plan(int64_t num_experts, int64_t top_k, int64_t max_tokens)
    : num_experts_(num_experts),
      top_k_(top_k),
      experts_(size_t(num_experts)),
      next_(size_t(num_experts)),
      token_(size_t(max_tokens * top_k)),
      weight_(size_t(max_tokens * top_k)) {}

void Plan::build(const int64_t* ids, const float* weights, int64_t tokens,
                 const std::vector<uint8_t>& on_cpu, int64_t gemm_min_rows) {
  const auto wanted = [&](int64_t id) {
    return id >= 0 && id < num_experts_ && on_cpu[size_t(id)];
  };
  std::fill(next_.begin(), next_.end(), 0);
  for (int64_t i = 0; i < tokens * top_k_; ++i)
    if (wanted(ids[i])) ++next_[size_t(ids[i])];
  pairs_ = active_ = 0;
  any_gemm_ = false;
  int64_t row = 0;
  for (int64_t e = 0; e < num_experts_; ++e) {
    const int64_t count = next_[size_t(e)];
    if (!count) continue;
    const bool gemm = count >= gemm_min_rows;
    any_gemm_ |= gemm;
    if (gemm) row = round_up(row, kBlockRows);
    experts_[size_t(active_++)] = {e, pairs_, count, gemm, row};
    row += gemm ? round_up(count, kBlockRows) : count;  // a block's rows lie all over it
    next_[size_t(e)] = pairs_;
    pairs_ += count;
  }
  for (int64_t i = 0; i < tokens * top_k_; ++i) {
    if (!wanted(ids[i])) continue;
    const auto pair = size_t(next_[size_t(ids[i])]++);
    token_[pair] = int32_t(i / top_k_);
    weight_[pair] = weights[i];
  }
}

}  // namespace kt
