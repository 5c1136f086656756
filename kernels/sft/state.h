// What the jobs of a layer in training work on.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../moe/plan.h"
#include "../moe/state.h"
#include "../sys/team.h"
#include "kt/training.h"
#include "lora.h"
#include "workspace.h"

namespace kt {

struct TrainingConfig {
  int64_t rank = 0;
  float scaling = 0;  // alpha / rank
  float dropout = 0;  // probability, below 1
  int64_t max_cache_depth = 1;
  bool recompute = false;         // keeps x only, computes gate and up again in backward
  bool skip_lora_grads = false;   // backward leaves the adapters out
  bool full_weight_grad = false;  // backward also gives the gradients of the weights
};

struct TrainingState {
  std::shared_ptr<LayerState> layer;
  TrainingConfig config;
  LoraWeights lora;
  std::shared_ptr<TrainingWorkspace> space;
  // Where the columns of gate and up have orders (OrderTable): for each column of the source its
  // place in the matrix that is packed, [experts held][gate, up][H]. Else empty.
  std::vector<int32_t> inverse_order;
};

// What a forward pass keeps for its backward pass: 2 H + 4 k I bytes a token, or 2 H where gate and
// up are computed again.
struct SavedForward {
  // Whether nobody works on it any more, once it is dropped.
  bool idle() const {
    const auto job = writer.lock();
    return !job || job->done();
  }

  int64_t tokens = 0;
  uint64_t seed = 0;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::weak_ptr<sys::Job> writer;     // the forward pass
  int64_t room = 0;                   // tokens that the memory below is for
  sys::Mapping x;                     // bf16 [tokens][H]
  std::vector<sys::Mapping> gate_up;  // per pool: bf16, by saved_tile()
};

// Where gate's (half 0) or up's (half 1) values of an expert's rows lie, a tile of columns after
// the other: [expert][tile][gate, up][row][32]. `first`: pairs before those of the plan.
inline int64_t saved_tile(int64_t first, const ExpertRows& e, int64_t tiles, int64_t tile,
                          int half) {
  return ((first + e.first) * tiles * 2 + e.count * (2 * tile + half)) * kTileRows;
}

}  // namespace kt
