// The forward pass of a layer in training as a job of its team.
#pragma once
#include <memory>

#include "../sys/team.h"
#include "state.h"

namespace kt {

// The pointers must stay valid until the job is done.
struct TrainingForwardArgs {
  const uint16_t* x;     // bf16 [tokens][H]
  const int64_t* ids;    // [tokens][top_k]
  const float* weights;  // [tokens][top_k]
  uint16_t* out;         // bf16 [tokens][H]
  int64_t tokens;
  uint64_t seed;
  bool drop;  // whether dropout is on, if the layer has any
};

class TrainingForwardJob : public sys::Job {
 public:
  // saved: where the pass keeps what its backward pass needs, or null.
  TrainingForwardJob(std::shared_ptr<TrainingState> state, const TrainingForwardArgs& args,
                     std::shared_ptr<SavedForward> saved);
  void run(sys::Worker& worker) noexcept override;
  void finished() noexcept override;

 private:
  const std::shared_ptr<TrainingState> state_;
  const TrainingForwardArgs args_;
  std::shared_ptr<SavedForward> saved_;  // released before the job counts as done
};

}  // namespace kt
