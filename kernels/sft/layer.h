// A MoE layer in training: low-rank adapters on its experts, forward passes that are kept, and
// their backward passes.
//
// The columns of I are in the order in which the layer stores them, in adapters and in gradients.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../sys/fork.h"
#include "../sys/team.h"
#include "backward.h"
#include "finite.h"
#include "forward.h"
#include "state.h"

namespace kt {

// Only one thread at a time may call a layer; a second one gets std::runtime_error.
//
// A forked child inherits the passes that are kept. It can only drop a pass that was still running
// at the fork. If a thread of the parent was in a call of the layer, the child has no passes.
class TrainingLayer {
 public:
  // Throws std::invalid_argument if a setting is out of range or an expert is not loaded.
  TrainingLayer(std::shared_ptr<sys::Team> team, std::shared_ptr<LayerState> layer,
                const TrainingConfig& config);

  const LayerConfig& layer_config() const { return state_->layer->config; }
  const TrainingConfig& config() const { return state_->config; }

  // Packs the adapters of all experts. Blocks. If a value is not finite in bf16, throws
  // std::invalid_argument and leaves the adapters as they were.
  void update_lora(const LoraSource& source);

  // Queues a forward pass. Throws std::runtime_error before update_lora, and if max_cache_depth
  // passes are kept already. Nothing is lost then.
  std::shared_ptr<sys::Job> submit_forward(const TrainingForwardArgs& args, bool save);
  // Does the same and waits for the pass.
  void forward(const TrainingForwardArgs& args, bool save);

  // Runs the backward pass of the newest forward pass that is kept, and drops that pass. Blocks.
  // Returns whether all gradients are finite. Throws std::runtime_error if no pass is kept or the
  // newest was lost in a fork, and std::invalid_argument for another number of tokens or a value of
  // grad_out that is not finite. The pass is still kept then.
  bool backward(const TrainingBackwardArgs& args, int64_t tokens);

  // Drops the newest pass that is kept. Throws std::runtime_error if none is.
  void drop_newest();
  // Drops all passes that are kept, and frees the process's spare memory.
  void clear();
  // The number of passes that are kept, and the tokens of the newest, 0 if there is none. Any
  // thread may call these.
  int64_t pending() const { return count_; }
  int64_t pending_tokens() const { return newest_tokens_; }

 private:
  using Lock = std::unique_lock<sys::ForkSafeLock>;
  Lock alone();
  std::vector<FloatArray> written_by(const TrainingBackwardArgs& args, int64_t tokens) const;
  std::shared_ptr<sys::Job> submit(const TrainingForwardArgs& args, bool save);
  std::shared_ptr<SavedForward> kept(const TrainingForwardArgs& args) const;
  SavedForward& newest() const;
  void drop_last();
  void count();

  const std::shared_ptr<sys::Team> team_;
  const std::shared_ptr<TrainingState> state_;
  const std::shared_ptr<SpareMemory> spare_ = SpareMemory::of_process();
  sys::ForkSafeLock use_;  // guards what follows
  std::vector<std::shared_ptr<SavedForward>> pending_;
  bool lost_ = false;  // whether passes were kept before a fork left none
  std::atomic<int64_t> count_{0}, newest_tokens_{0};
};

}  // namespace kt
