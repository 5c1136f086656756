#include "layer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "../sys/need.h"
#include "forward.h"
#include "state.h"
#include "weight_jobs.h"

namespace kt {
namespace {

// Marks slots as not loaded while they are written, because a child forked meanwhile has only parts
// of them. Afterwards they are loaded, or as before if loading failed.
class Unloaded {
 public:
  Unloaded(std::vector<uint8_t>& loaded, const std::vector<SlotSource>& experts)
      : loaded_(loaded), experts_(experts) {
    for (const SlotSource& expert : experts)
      then_.push_back(std::exchange(loaded_[size_t(expert.slot)], 0));
  }
  ~Unloaded() {
    for (size_t i = 0; i < then_.size(); ++i) loaded_[size_t(experts_[i].slot)] = then_[i];
  }
  Unloaded(const Unloaded&) = delete;
  Unloaded& operator=(const Unloaded&) = delete;
  void succeeded() { std::fill(then_.begin(), then_.end(), 1); }

 private:
  std::vector<uint8_t>& loaded_;
  const std::vector<SlotSource>& experts_;
  std::vector<uint8_t> then_;
};

// Runs between two passes, because the team runs one job at a time. Lean, so that no reserve wakes.
class ChangeOfSlots : public sys::Job {
 public:
  ChangeOfSlots(std::shared_ptr<LayerState> layer, std::vector<uint8_t> on_cpu)
      : Job(true), layer_(std::move(layer)), on_cpu_(std::move(on_cpu)) {}
  void run(sys::Worker& worker) noexcept override {
    if (worker.rank != 0) return;
    // Atomic, because a thread that creates a pass reads the slots of its batch concurrently.
    for (size_t slot = 0; slot < on_cpu_.size(); ++slot)
      std::atomic_ref(layer_->on_cpu[slot]).store(on_cpu_[slot], std::memory_order_relaxed);
  }

 private:
  const std::shared_ptr<LayerState> layer_;
  const std::vector<uint8_t> on_cpu_;
};

}  // namespace

MoeLayer::MoeLayer(std::shared_ptr<sys::Team> team, LayerConfig config)
    : team_(std::move(team)), state_(std::make_shared<LayerState>(*team_, std::move(config))) {}

const LayerConfig& MoeLayer::config() const { return state_->config; }

void MoeLayer::need_slot(int64_t slot) const {
  need(slot >= 0 && slot < config().num_experts && state_->position[size_t(slot)] >= 0,
       "expert slot " + std::to_string(slot) + " is not held on the CPU");
}

void MoeLayer::load(const std::vector<SlotSource>& experts) {
  std::vector<uint8_t> named(size_t(config().num_experts));
  for (const SlotSource& expert : experts) {
    need_slot(expert.slot);
    uint8_t& twice = named[size_t(expert.slot)];
    need(!twice, "expert slot " + std::to_string(expert.slot) + " is named twice");
    twice = 1;
    check_expert(config(), expert);
  }
  const auto job = std::make_shared<PackJob>(state_, experts, *team_);
  Unloaded meanwhile(state_->loaded, experts);
  team_->submit(job);
  job->wait();
  need(job->problem().empty(), job->problem());
  meanwhile.succeeded();
}

void MoeLayer::load_packed(int64_t slot, const ByMatrix<const uint8_t*>& tiles,
                           const ByMatrix<const float*>& bias) {
  need_slot(slot);
  for (Matrix m : config().matrices())
    need(tiles[m] != nullptr,
         std::string(kMatrixNames[m]) + ": address 0; expected the address of packed tiles");
  need(config().activation.gated || (!tiles[kGate] && !bias[kGate]),
       "gate: these experts have none; accepted: address 0");
  const auto job = std::make_shared<PackedLoad>(state_, slot, tiles, bias, team_->threads());
  state_->loaded[size_t(slot)] = 0;
  team_->submit(job);
  job->wait();
  const std::string problem = job->problem();
  state_->loaded[size_t(slot)] = problem.empty();
  need(problem.empty(), "expert slot " + std::to_string(slot) + ", " + problem);
}

void MoeLayer::save_packed(int64_t slot, int matrix, uint8_t* dst) const {
  need_slot(slot);
  need_matrix(config(), matrix);
  need(dst != nullptr, "dst is address 0; expected a buffer for the packed tiles");
  need(!state_->order.present[size_t(state_->position[size_t(slot)])],
       "expert slot " + std::to_string(slot) +
           ": its columns are in another order (act-order), which packed files cannot hold");
  const auto job = std::make_shared<PackedSave>(state_, slot, Matrix(matrix), dst);
  team_->submit(job);
  job->wait();
}

void MoeLayer::set_on_cpu(std::vector<uint8_t> on_cpu) {
  need_entry_per_expert(on_cpu, config().num_experts);
  for (size_t slot = 0; slot < on_cpu.size(); ++slot)
    need(!on_cpu[slot] || state_->loaded[slot],
         "expert slot " + std::to_string(slot) +
             " is not loaded on the CPU, so the CPU cannot compute it");
  const auto job = std::make_shared<ChangeOfSlots>(state_, std::move(on_cpu));
  team_->submit(job);
  job->wait();
}

std::shared_ptr<sys::Job> MoeLayer::submit(const ForwardArgs& args) {
  check_pass(args);
  auto job = std::make_shared<ForwardJob>(state_, args);
  team_->submit(job);
  return job;
}

void MoeLayer::unpack(int64_t slot, int matrix, float* dst) const {
  need_slot(slot);
  need_matrix(config(), matrix);
  need(dst != nullptr, "dst is address 0; expected a buffer for the weights");
  const LayerConfig& c = config();
  for (int p = 0; p < team_->pools(); ++p) {
    const PoolPart& part = state_->pools[size_t(p)];
    if (!part.size) continue;
    const auto m = Matrix(matrix);
    const bool down = m == kDown;
    unpack_matrix(part.layout[m], state_->expert(p, slot) + part.begin_of(m), part.stride_of(m),
                  dst + (down ? part.begin : part.begin * c.hidden_size),
                  down ? c.intermediate_size : c.hidden_size);
  }
  const int64_t position = state_->position[size_t(slot)];
  if (matrix == kDown || !state_->order.present[size_t(position)]) return;
  const int32_t* order = state_->order.row(position, Matrix(matrix));
  std::vector<float> row(size_t(c.hidden_size));
  for (int64_t i = 0; i < c.intermediate_size; ++i, dst += c.hidden_size) {
    for (int64_t k = 0; k < c.hidden_size; ++k) row[size_t(order[k])] = dst[k];
    std::copy(row.begin(), row.end(), dst);
  }
}

int64_t MoeLayer::packed_bytes() const {
  int64_t total = 0;
  for (const PoolPart& part : state_->pools) total += int64_t(part.memory.size());
  return total;
}

}  // namespace kt
