// A MoE layer in training: low-rank adapters on its experts, forward passes that are kept, and
// their backward passes.
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

// Not for two threads at once: whoever comes second gets std::runtime_error.
//
// A forked child inherits the passes that are kept. A pass that was not done at the fork can only
// be dropped. If a thread of the parent was in a call of the layer, the child has no passes.
class TrainingLayer {
 public:
  // Throws std::invalid_argument for a setting that is out of range, or experts not loaded yet.
  TrainingLayer(std::shared_ptr<sys::Team> team, std::shared_ptr<LayerState> layer,
                const TrainingConfig& config);

  const LayerConfig& layer_config() const { return state_->layer->config; }
  const TrainingConfig& config() const { return state_->config; }

  // Packs the adapters of all experts; blocks. Throws std::invalid_argument for a value that is not
  // finite in bf16: they are then as they were.
  void update_lora(const LoraSource& source);

  // Queues a forward pass. Throws std::runtime_error before update_lora, and where max_cache_depth
  // passes are kept already; nothing is lost then.
  std::shared_ptr<sys::Job> submit_forward(const TrainingForwardArgs& args, bool save);
  // The same, and waits for it.
  void forward(const TrainingForwardArgs& args, bool save);

  // The backward pass of the newest forward pass that is kept, which is then dropped; blocks.
  // Returns whether all gradients are finite. Throws std::runtime_error if there is none or it was
  // lost in a fork, and std::invalid_argument for a different number of tokens or for a NaN or an
  // infinity in grad_out. The pass is then still kept.
  bool backward(const TrainingBackwardArgs& args, int64_t tokens);

  // Throws std::runtime_error if none is kept.
  void drop_newest();
  // Drops all passes that are kept, and frees the process's spare memory.
  void clear();
  // From any thread: how many are kept, and the tokens of the newest; 0 where there is none.
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
