// Tokens to experts: which (token, expert) pairs a forward pass computes, sorted by expert.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kt {

struct ExpertRows {
  int64_t slot;   // expert slot
  int64_t first;  // first pair
  int64_t count;  // pairs, >= 1
  bool gemm;      // computed by GEMM kernels
  int64_t row;    // first row in the buffers of A rows, where GEMM experts have whole blocks
};

// Pairs are grouped by expert in ascending slot order and keep token order within an expert; a
// token that names an expert twice has two pairs. All memory is reserved by the constructor.
class Plan {
 public:
  Plan(int64_t num_experts, int64_t top_k, int64_t max_tokens);

  // ids and weights are [tokens, top_k]; ids outside 0..num_experts-1 and slots whose on_cpu is
  // 0 are skipped. Experts with at least gemm_min_rows pairs go to the GEMM kernels.
  void build(const int64_t* ids, const float* weights, int64_t tokens,
             const std::vector<uint8_t>& on_cpu, int64_t gemm_min_rows);

  int64_t pairs() const { return pairs_; }
  int64_t active() const { return active_; }
  bool any_gemm() const { return any_gemm_; }
  const ExpertRows& expert(int64_t i) const { return experts_[std::size_t(i)]; }
  const int32_t* tokens() const { return token_.data(); }  // [pairs]
  const float* weights() const { return weight_.data(); }  // [pairs]

 private:
  int64_t num_experts_, top_k_;
  int64_t pairs_ = 0, active_ = 0;
  bool any_gemm_ = false;
  std::vector<ExpertRows> experts_;
  std::vector<int64_t> next_;  // per expert: count, then the next free pair
  std::vector<int32_t> token_;
  std::vector<float> weight_;
};

}  // namespace kt
