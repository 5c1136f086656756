// The state that the jobs of a layer in training share.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../moe/plan.h"
#include "../moe/state.h"
#include "../sys/fork.h"
#include "../sys/team.h"
#include "kt/training.h"
#include "lora.h"
#include "spare.h"
#include "workspace.h"

namespace kt {

struct TrainingConfig {
  int64_t rank = 0;
  float scaling = 0;  // alpha / rank
  float dropout = 0;  // probability, below 1
  int64_t max_cache_depth = 1;
  bool recompute = false;         // keep x only, and compute the rest again in backward
  bool skip_lora_grads = false;   // treat the adapters' terms as constants in backward
  bool full_weight_grad = false;  // also compute the gradients of the weights

  // Whether a forward pass keeps scaling * x A^T of gate and up. Only the gradients of the adapters
  // need it.
  bool keeps_ranks() const { return !recompute && !skip_lora_grads; }
};

struct TrainingState {
  std::shared_ptr<LayerState> layer;
  TrainingConfig config;
  LoraWeights lora;
  std::shared_ptr<TrainingWorkspace> space;
};

// What a forward pass keeps for its backward pass. Its memory returns to the spare memory when the
// pass is no longer needed.
struct SavedForward : PassMemory {
  SavedForward(const std::shared_ptr<SpareMemory>& spare, const PassMemory::Sizes& sizes)
      : PassMemory(spare->take(sizes)), spare_(spare) {}
  ~SavedForward() {
    if (const auto spare = spare_.lock()) spare->give_back(std::move(*this));
  }
  SavedForward(const SavedForward&) = delete;

  // Whether the process forked while the pass was running. The child never completes it.
  bool lost() const { return !complete.load(std::memory_order_acquire) && forks != sys::forks(); }

  int64_t tokens = 0;
  uint64_t seed = 0;
  bool drop = false;  // whether dropout was on
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<uint8_t> on_cpu;          // [num_experts]: the slots that the forward pass computed
  std::atomic<bool> complete{false};    // set once the forward pass is done
  const uint32_t forks = sys::forks();  // of the process that submitted it
  // The position of each source column in the packed matrix, [experts held][gate, up][H]. Set
  // before the backward pass, if the columns of gate and up are in other orders (OrderTable).
  std::vector<int32_t> inverse_order;

 private:
  const std::weak_ptr<SpareMemory> spare_;
};

// The index of gate's (half 0) or up's (half 1) values of an expert's rows in an array that goes
// tile by tile: [expert][tile][gate, up][row][32]. `first`: the pairs before those of the plan.
inline int64_t saved_tile(int64_t first, const ExpertRows& e, int64_t tiles, int64_t tile,
                          int half) {
  return ((first + e.first) * tiles * 2 + e.count * (2 * tile + half)) * kTileRows;
}

}  // namespace kt
