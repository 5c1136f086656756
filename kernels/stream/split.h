// Splits the routes of a batch into those that a layer computes now and those that it defers.
#pragma once
#include <cstdint>
#include <vector>

namespace kt {

// Implements select_deferred_experts of src/kt_kernel/moe/routing.py for a layer's ids. Keeps its
// scratch memory, so a split allocates nothing.
class DeferredSplit {
 public:
  DeferredSplit(int64_t num_experts, int64_t top_k);

  // All arrays are [tokens, top_k]. For each token, the protected_k highest weights are protected
  // (of equal weights the earlier; NaN is the highest). An expert that any token protects is
  // immediate for all tokens: its routes stay in `ids`. The others move to `deferred`. Each array
  // has -1 where the other has an id. Ids of experts that do not exist become -1 in both.
  void run(const float* weights, int64_t tokens, int64_t protected_k, int64_t* ids,
           int64_t* deferred);

 private:
  void protect(const int64_t* ids, const float* weights, int64_t protected_k);
  bool is_expert(int64_t id) const { return id >= 0 && id < int64_t(protected_.size()); }

  const int64_t top_k_;
  std::vector<uint8_t> protected_;  // by expert; all 0 between two runs
  std::vector<int32_t> order_;      // a token's weights as integers that sort in the same order
};

}  // namespace kt
