// Maps tokens to experts: the (token, expert) pairs that a forward pass computes, sorted by expert.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "form.h"

namespace kt {

struct ExpertRows {
  int64_t slot;         // expert slot
  int64_t first;        // first pair
  int64_t count;        // pairs, >= 1
  int64_t row;          // first row in the buffers of A rows, where GEMM experts have whole blocks
  ByMatrix<bool> gemm;  // whether GEMM kernels are used

  bool any_gemm() const { return gemm[kGate] || gemm[kUp] || gemm[kDown]; }
};

constexpr int64_t kMaxGroups = 4;

// The most rows of an expert in one work item, unless there are few pairs. Otherwise an expert with
// most of the tokens would keep a single thread busy.
constexpr int64_t kItemRows = 512;

// Splits rows into equal parts of at most `most`, rounded up to whole blocks of A rows, so that no
// part is a small remainder.
inline int64_t even_part(int64_t rows, int64_t most) {
  constexpr int64_t kUnit = 32;
  const int64_t parts = (rows + most - 1) / most, part = (rows + parts - 1) / parts;
  return (part + kUnit - 1) / kUnit * kUnit;
}

// Up to this many pairs are sorted by insertion, without visiting all experts.
constexpr int64_t kFewIds = 64;

// Up to this many pairs, reading the weights dominates, and a chunk is computed as a decode step;
// with more pairs, it is computed as prefill.
constexpr int64_t kFewPairs = 512;

// Whether more than `most` of n ids name an expert that is on the CPU. Another thread may change
// `on_cpu` meanwhile.
bool more_pairs_than(int64_t most, const int64_t* ids, int64_t n, std::vector<uint8_t>& on_cpu);

// Rows [first, last) of expert(index), which are multiplied with a tile of weights at a time.
struct WorkItem {
  int64_t expert, first, last;
  int64_t rows() const { return last - first; }
};

// A token's experts are summed within groups of slots in ascending order, then over the groups in
// ascending order. A thread computes one output tile of one group. The number of groups depends
// only on the layer, so that results depend neither on threads nor on other tokens.
int64_t expert_groups(int64_t num_experts, int64_t hidden);

// The experts [first, last) of a plan that belong to one group, which has at least one.
struct ExpertGroup {
  int64_t first, last;
  int64_t pairs;
};

struct PlanInput {
  const int64_t* ids;    // [tokens, top_k]; ids outside 0..num_experts-1 are skipped
  const float* weights;  // [tokens, top_k]
  int64_t tokens, top_k;
  const std::vector<uint8_t>& on_cpu;  // [num_experts]; experts with 0 are skipped
  ByMatrix<int64_t> gemm_min_rows;     // GEMM kernels compute experts with at least this many pairs
  int64_t groups;
};

// Pairs are grouped by expert in ascending slot order, and keep token order within an expert. A
// token that names an expert twice has two pairs. The constructor reserves all memory.
class Plan {
 public:
  // For layers with at most max_experts experts, and at most max_pairs pairs of token and id.
  Plan(int64_t max_experts, int64_t max_pairs);

  // An expert is one work item. With more than kFewPairs pairs, it is split into items of at most
  // kItemRows rows. The items with the most rows come first, so that only small ones are left when
  // threads run out of work.
  void build(const PlanInput& in);

  int64_t pairs() const { return pairs_; }
  int64_t active() const { return active_; }
  bool any_gemm(Matrix m) const { return any_gemm_[m]; }
  const ExpertRows& expert(int64_t i) const { return experts_[std::size_t(i)]; }
  // Calls f(expert, first, last) for each expert's part of the pairs [first, last).
  template <class F> void each_expert(int64_t first, int64_t last, F f) const {
    for (int64_t i = expert_of_pair(first); i < active_ && expert(i).first < last; ++i) {
      const ExpertRows& e = expert(i);
      const int64_t end = e.first + e.count;
      f(e, first > e.first ? first : e.first, last < end ? last : end);
    }
  }
  int64_t items() const { return items_; }
  const WorkItem& item(int64_t i) const { return item_[std::size_t(i)]; }
  int64_t groups() const { return groups_; }
  const ExpertGroup& group(int64_t i) const { return group_[std::size_t(i)]; }
  const int32_t* tokens() const { return token_.data(); }  // [pairs]
  const float* weights() const { return weight_.data(); }  // [pairs]
  // [pairs]: the pair's position in the ids, token * top_k + j.
  const int32_t* routes() const { return route_.data(); }

 private:
  int64_t expert_of_pair(int64_t pair) const;
  void sort_few(const PlanInput& in);
  void sort_many(const PlanInput& in);
  void add_expert(const PlanInput& in, int64_t slot, int64_t count);
  void add_items();

  int64_t pairs_ = 0, active_ = 0, items_ = 0, groups_ = 0, rows_ = 0;
  ByMatrix<bool> any_gemm_{};
  std::vector<ExpertRows> experts_;
  std::vector<WorkItem> item_;
  std::vector<ExpertGroup> group_;
  std::vector<int64_t> next_;  // sort_many: per expert its count, then the next free pair
  std::vector<int32_t> token_, route_;
  std::vector<float> weight_;
};

}  // namespace kt
