// The backward pass of a layer in training as a job of its team.
#pragma once
#include <memory>

#include "../sys/team.h"
#include "state.h"

namespace kt {

// Gradients of all experts, float32 in the shapes of their tensors; null: not wanted. Slots that
// are not held here get zeros.
struct WeightGradients {
  ByMatrix<float*> a, b;    // adapters: [E, rank, in], [E, out, rank]
  ByMatrix<float*> weight;  // [E, I, H], [E, I, H], [E, H, I]
};

// The pointers must stay valid until the job is done.
struct TrainingBackwardArgs {
  const uint16_t* grad_out;  // bf16 [tokens][H]
  uint16_t* grad_in;         // bf16 [tokens][H]
  float* grad_weights;       // [tokens][top_k]: of the router weights
  WeightGradients grads;
};

class TrainingBackwardJob : public sys::Job {
 public:
  TrainingBackwardJob(std::shared_ptr<TrainingState> state, const TrainingBackwardArgs& args,
                      std::shared_ptr<SavedForward> saved);
  void run(sys::Worker& worker) noexcept override;
  void finished() noexcept override { saved_.reset(); }

 private:
  const std::shared_ptr<TrainingState> state_;
  const TrainingBackwardArgs args_;
  std::shared_ptr<SavedForward> saved_;  // released before the job counts as done
};

}  // namespace kt
