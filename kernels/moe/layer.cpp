#include "layer.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../pack/pack.h"
#include "forward.h"

namespace kt {
namespace {

MatrixLayout layout_of(const LayerConfig& c, int64_t rows, int64_t cols) {
  return {c.format, rows, cols, c.group};
}

// Splits I into one contiguous part per pool, in units that no group or tile crosses, in
// proportion to the pools' threads.
std::vector<PoolPart> split_pools(const sys::Team& team, const LayerConfig& c, int64_t held) {
  const int64_t unit = layout_of(c, 1, 1).split_unit();
  const int64_t units = ceil_div(c.intermediate_size, unit);
  std::vector<PoolPart> parts;
  int64_t threads_before = 0;
  for (int p = 0; p < team.pools(); ++p) {
    const int64_t first = units * threads_before / team.threads();
    threads_before += team.threads(p);
    const int64_t last = units * threads_before / team.threads();
    PoolPart part;
    part.begin = std::min(first * unit, c.intermediate_size);
    part.size = std::min(last * unit, c.intermediate_size) - part.begin;
    part.up = layout_of(c, part.size, c.hidden_size);
    part.down = layout_of(c, c.hidden_size, part.size);
    part.memory = sys::Mapping(part.size ? size_t(held * part.expert_bytes()) : 0);
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace

// Packs one expert: the tiles of each pool are shared among its threads, which so touch the
// memory first.
class PackJob : public sys::Job {
 public:
  PackJob(MoeLayer& layer, int64_t slot, const ExpertSource& source)
      : layer_(layer), slot_(slot), source_(source) {}

  void run(sys::Worker& worker) noexcept override {
    const PoolPart& part = layer_.pools_[size_t(worker.pool)];
    if (!part.size) return;
    auto* dst = const_cast<uint8_t*>(layer_.expert(worker.pool, slot_));
    const LayerConfig& c = layer_.config_;
    const int64_t pairs = 2 * part.up.tiles(), all = pairs + part.down.tiles();
    const int64_t begin = all * worker.index / worker.pool_threads;
    const int64_t end = all * (worker.index + 1) / worker.pool_threads;
    for (int64_t i = begin; i < end && !failed_; ++i) {
      if (i < pairs) {
        const bool up = i % 2;
        pack(part.up, {up ? source_.up : source_.gate, source_.dtype, c.hidden_size, part.begin, 0},
             i / 2, dst + i * part.up.tile_bytes(), up ? "up" : "gate");
      } else {
        pack(part.down, {source_.down, source_.dtype, c.intermediate_size, 0, part.begin},
             i - pairs, dst + 2 * part.up.bytes() + (i - pairs) * part.down.tile_bytes(), "down");
      }
    }
  }

  std::string message() const { return failed_ ? message_ : ""; }

 private:
  void pack(const MatrixLayout& layout, const MatrixSource& source, int64_t tile, uint8_t* dst,
            const char* name) noexcept {
    std::string text;
    try {
      int64_t row = 0;
      const PackError error = pack_tile(layout, source, tile, dst, &row);
      if (error == PackError::kNone) return;
      text = std::string(name) + " row " + std::to_string(row) +
             (error == PackError::kNotFinite
                  ? ": a weight is NaN or infinite; integer formats need finite weights"
                  : ": a group's scale is above the fp16 range (65504); use a format with "
                    "float32 scales");
    } catch (const std::bad_alloc&) {
      text = "out of memory while packing";
    }
    bool expected = false;
    if (claimed_.compare_exchange_strong(expected, true)) {
      message_ = std::move(text);
      failed_ = true;
    }
  }

  MoeLayer& layer_;
  int64_t slot_;
  const ExpertSource& source_;
  std::atomic<bool> claimed_{false}, failed_{false};
  std::string message_;
};

MoeLayer::MoeLayer(std::shared_ptr<sys::Team> team, LayerConfig config)
    : team_(std::move(team)), config_(std::move(config)) {
  const FormatKernels& kernels = config_.table->format[int(config_.format)];
  if (config_.kind == KernelKind::kTile && !kernels.tile)
    throw std::invalid_argument("the tile kernel kind is pinned, but the \"" +
                                std::string(config_.table->name) +
                                "\" kernels have no tile kernel for this weight format");
  if (team_->pools() > kMaxPools)
    throw std::invalid_argument(std::to_string(team_->pools()) + " pools; at most " +
                                std::to_string(kMaxPools) + " are supported");
  int64_t held = 0;
  for (uint8_t here : config_.on_cpu) position_.push_back(here ? held++ : -1);
  pools_ = split_pools(*team_, config_, held);
  workspace_ = workspace_for(team_, {config_.max_tokens, config_.top_k, config_.num_experts,
                                     config_.hidden_size, config_.intermediate_size});
}

MoeLayer::~MoeLayer() {
  if (last_ && last_process_ == getpid()) last_->wait();
}

const uint8_t* MoeLayer::expert(int pool, int64_t slot) const {
  const PoolPart& part = pools_[size_t(pool)];
  return part.memory.data() + position_[size_t(slot)] * part.expert_bytes();
}

const float* MoeLayer::bias(const std::vector<float>& all, int64_t slot, int64_t width) const {
  if (all.empty()) return nullptr;
  return all.data() + position_[size_t(slot)] * round_up(width, kTileRows);
}

void MoeLayer::load_expert(int64_t slot, const ExpertSource& source) {
  if (slot < 0 || slot >= config_.num_experts || position_[size_t(slot)] < 0)
    throw std::invalid_argument("expert slot " + std::to_string(slot) + " is not held on the CPU");
  auto job = std::make_shared<PackJob>(*this, slot, source);
  team_->submit(job);
  job->wait();
  if (const std::string text = job->message(); !text.empty())
    throw std::invalid_argument("expert slot " + std::to_string(slot) + ", " + text);

  const int64_t held = std::count(config_.on_cpu.begin(), config_.on_cpu.end(), 1);
  const auto keep = [&](std::vector<float>& all, const float* from, int64_t width) {
    if (!from) return;
    const int64_t padded = round_up(width, kTileRows);
    if (all.empty()) all.assign(size_t(held * padded), 0.0f);
    std::copy_n(from, width, all.data() + position_[size_t(slot)] * padded);
  };
  keep(gate_bias_, source.gate_bias, config_.intermediate_size);
  keep(up_bias_, source.up_bias, config_.intermediate_size);
  keep(down_bias_, source.down_bias, config_.hidden_size);
}

std::shared_ptr<sys::Job> MoeLayer::submit(const ForwardArgs& args) {
  auto job = std::make_shared<ForwardJob>(*this, args);
  const std::lock_guard lock(last_mutex_);
  team_->submit(job);
  last_ = job;
  last_process_ = getpid();
  return job;
}

void MoeLayer::unpack(int64_t slot, int matrix, float* dst) const {
  for (int p = 0; p < team_->pools(); ++p) {
    const PoolPart& part = pools_[size_t(p)];
    if (!part.size) continue;
    const uint8_t* base = expert(p, slot);
    if (matrix < 2)
      unpack_matrix(part.up, base + matrix * part.up.tile_bytes(), 2 * part.up.tile_bytes(),
                    dst + part.begin * config_.hidden_size, config_.hidden_size);
    else
      unpack_matrix(part.down, base + 2 * part.up.bytes(), part.down.tile_bytes(), dst + part.begin,
                    config_.intermediate_size);
  }
}

int64_t MoeLayer::packed_bytes() const {
  int64_t total = 0;
  for (const PoolPart& part : pools_) total += int64_t(part.memory.size());
  return total;
}

}  // namespace kt
