// The cold experts of one MoE layer: packed weights on the NUMA pools, and their forward pass.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../sys/numa_memory.h"
#include "../sys/team.h"
#include "kt/kernel_table.h"
#include "workspace.h"

namespace kt {

constexpr int kMaxPools = 64;

struct LayerConfig {
  int64_t num_experts, top_k, hidden_size, intermediate_size;
  WeightFormat format;
  int group;  // columns per scale of kInt4Group, else 0
  Activation activation;
  std::vector<uint8_t> on_cpu;  // [num_experts], 1 for slots held here
  int64_t max_tokens;           // tokens per chunk: sizes the workspace
  const KernelTable* table;
  KernelKind kind;
};

// Row-major weights of one expert; biases are float32 and may be null.
struct ExpertSource {
  const void *gate, *up, *down;  // [I, H], [I, H], [H, I]
  DType dtype;
  const float *gate_bias, *up_bias, *down_bias;
};

struct LayerStats {
  std::atomic<int64_t> forwards{0}, tokens{0}, expert_calls{0}, experts_touched{0};
  std::atomic<int64_t> vector_calls{0}, tile_calls{0};  // experts by kind of kernel
};

// Arguments of one forward pass. The pointers must stay valid until its job is done.
struct ForwardArgs {
  const void* x;  // [tokens, H] of dtype
  DType dtype;
  int64_t tokens;
  const int64_t* ids;    // [tokens, top_k], slots
  const float* weights;  // [tokens, top_k]
  void* out;             // [tokens, H] of dtype, or null
  const float* add;      // [tokens, H] added before the rounding, or null
  float* partial;        // [tokens, H]: receives the sum unrounded, or null
};

// The part of the intermediate dimension that one pool holds.
struct PoolPart {
  int64_t begin, size;    // of I; size may be 0
  MatrixLayout up, down;  // of gate and up (the same), and down
  sys::Mapping memory;    // experts held, in ascending slot order
  int64_t expert_bytes() const { return 2 * up.bytes() + down.bytes(); }
};

class MoeLayer {
 public:
  // Throws std::invalid_argument for a configuration that no kernel serves.
  MoeLayer(std::shared_ptr<sys::Team> team, LayerConfig config);
  ~MoeLayer();  // waits for the jobs submitted: they use the layer, but must not own it, or a
                // worker that drops the last job would have to destroy its own team
  MoeLayer(const MoeLayer&) = delete;
  MoeLayer& operator=(const MoeLayer&) = delete;

  // Packs one expert, with all threads of the team; blocks. Throws std::invalid_argument when
  // the slot is not held here or a weight cannot be represented.
  void load_expert(int64_t slot, const ExpertSource& source);

  // Queues a forward pass and returns at once. All experts held must have been loaded.
  std::shared_ptr<sys::Job> submit(const ForwardArgs& args);

  // Dequantised weights: matrix 0 gate, 1 up [I, H], 2 down [H, I].
  void unpack(int64_t slot, int matrix, float* dst) const;

  const LayerConfig& config() const { return config_; }
  const LayerStats& stats() const { return stats_; }
  int64_t packed_bytes() const;

 private:
  friend class ForwardJob;
  friend class PackJob;
  const uint8_t* expert(int pool, int64_t slot) const;
  const float* bias(const std::vector<float>& all, int64_t slot, int64_t width) const;

  std::shared_ptr<sys::Team> team_;
  LayerConfig config_;
  std::vector<int64_t> position_;  // slot -> place among the experts held, or -1
  std::vector<PoolPart> pools_;
  // [experts held][tiles(I or H) * 32]; empty until an expert comes with biases
  std::vector<float> gate_bias_, up_bias_, down_bias_;
  std::shared_ptr<Workspace> workspace_;
  LayerStats stats_;
  std::mutex last_mutex_;
  std::shared_ptr<sys::Job> last_;  // the newest job; jobs of a team end in order
  int last_process_ = 0;            // its process: a forked child has no worker to wait for
};

}  // namespace kt
