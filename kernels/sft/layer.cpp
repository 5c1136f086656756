#include "layer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "../sys/need.h"

namespace kt {
namespace {

void check(const TrainingConfig& c) {
  need_in_range("rank", c.rank, 1, kMaxRank);
  need(std::isfinite(c.scaling),
       "scaling " + std::to_string(c.scaling) + "; accepted: a finite number (alpha / rank)");
  need(c.dropout >= 0 && c.dropout < 1,
       "dropout " + std::to_string(c.dropout) + "; accepted: at least 0 and below 1");
  need_in_range("max_cache_depth", c.max_cache_depth, 1, 1 << 20);
}

// The backward pass implements the gradients of SwiGLU only.
void need_swiglu(const LayerConfig& c) {
  need(c.activation.is_swiglu(), "activation " + std::to_string(int(c.activation.function)) +
                                     (c.activation.gated ? "" : " without a gate") +
                                     "; training accepts SwiGLU only (0, silu, with a gate)");
  need(!c.weight_on_input,
       "router weights multiply the input of the experts; training accepts router weights on "
       "the output only");
}

void need_loaded(const LayerState& layer) {
  for (size_t slot = 0; slot < layer.loaded.size(); ++slot)
    need(layer.position[slot] < 0 || layer.loaded[slot],
         "expert slot " + std::to_string(slot) + " is not loaded; load all experts first");
}

TrainingSize size_of(const LayerState& layer, const TrainingConfig& c) {
  const LayerConfig& l = layer.config;
  const int64_t pairs = l.max_tokens * l.top_k;  // fits: LayerConfig was checked
  const int64_t tiles = kMatrices * round_up(c.rank, kTileRows) / kTileRows;
  need((std::min(l.num_experts, pairs) + pairs / kItemRows) * tiles <= sys::kMaxTasks,
       "rank " + std::to_string(c.rank) + " is too large for " + std::to_string(l.num_experts) +
           " experts with max_tokens " + std::to_string(l.max_tokens));
  return {l.max_tokens, l.top_k, pairs, l.num_experts, l.hidden_size, l.intermediate_size, c.rank};
}

std::vector<int32_t> inverse_order(const LayerState& layer) {
  if (!layer.order.any) return {};
  const int64_t h = layer.config.hidden_size;
  std::vector<int32_t> inverse(size_t(layer.held * 2 * h));
  for (int64_t position = 0; position < layer.held; ++position)
    for (Matrix m : {kGate, kUp}) {
      const int32_t* order = layer.order.row(position, m);
      int32_t* to = inverse.data() + (2 * position + m) * h;
      for (int64_t i = 0; i < h; ++i) to[order[i]] = int32_t(i);
    }
  return inverse;
}

// Throws std::invalid_argument if bf16 rows [tokens][h] have a NaN or infinite value.
void need_finite(sys::Team& team, const uint16_t* rows, int64_t tokens, int64_t h) {
  if (all_finite(team, {{rows, tokens * h, true}})) return;
  const int64_t bad = std::find_if(rows, rows + tokens * h,
                                   [](uint16_t value) { return (value & 0x7f80) == 0x7f80; }) -
                      rows;
  throw std::invalid_argument("grad_out has a NaN or infinite value in token " +
                              std::to_string(bad / h) + ", column " + std::to_string(bad % h) +
                              "; accepted: finite values");
}

}  // namespace

TrainingLayer::TrainingLayer(std::shared_ptr<sys::Team> team, std::shared_ptr<LayerState> layer,
                             const TrainingConfig& config)
    : team_(std::move(team)), state_([&] {
        check(config);
        need_swiglu(layer->config);
        need_loaded(*layer);
        const TrainingSize size = size_of(*layer, config);
        return std::make_shared<TrainingState>(
            TrainingState{layer, config, LoraWeights(layer, *team_, config.rank),
                          training_workspace_for(*layer, size)});
      }()) {}

TrainingLayer::Lock TrainingLayer::alone() {
  Lock lock(use_, std::try_to_lock);
  if (!lock)
    throw std::runtime_error(
        "another thread is using this layer; call it from one thread at a time");
  if (use_.taken_over()) {
    // The other thread may have been changing the vector, so its elements cannot even be freed.
    std::construct_at(&pending_);
    lost_ = lost_ || count_ > 0;
    count();
  }
  return lock;
}

void TrainingLayer::update_lora(const LoraSource& source) {
  const Lock lock = alone();
  state_->lora.pack(*team_, source);
}

// Memory for a pass that is kept, with copies of its routes.
std::shared_ptr<SavedForward> TrainingLayer::kept(const TrainingForwardArgs& args) const {
  const LayerState& layer = *state_->layer;
  const LayerConfig& c = layer.config;
  const int64_t routes = args.tokens * c.top_k;
  PassMemory::Sizes sizes{size_t(args.tokens * c.hidden_size) * 2, 0, {}};
  if (config().keeps_ranks()) sizes.ranks = size_t(routes * 2 * config().rank) * sizeof(float);
  for (size_t p = 0; p < layer.pools.size() && !config().recompute; ++p)
    sizes.gate_up.push_back(
        {size_t(routes * round_up(layer.pools[p].size, kTileRows)) * 4, team_->node(int(p))});
  auto saved = std::make_shared<SavedForward>(spare_, sizes);
  saved->tokens = args.tokens;
  saved->seed = args.seed;
  saved->drop = args.drop;
  saved->ids.assign(args.ids, args.ids + routes);
  saved->weights.assign(args.weights, args.weights + routes);
  saved->on_cpu.resize(size_t(c.num_experts));
  return saved;
}

std::shared_ptr<sys::Job> TrainingLayer::submit(const TrainingForwardArgs& args, bool save) {
  need_in_range("tokens", args.tokens, 0,
                std::numeric_limits<int32_t>::max() / layer_config().top_k);
  need_loaded(*state_->layer);
  if (!state_->lora.packed())
    throw std::runtime_error("the adapters have not been set; call update_lora before forward");
  const int64_t depth = config().max_cache_depth;
  if (save && pending() >= depth)
    throw std::runtime_error(
        std::to_string(pending()) + " forward passes wait for backward and max_cache_depth is " +
        std::to_string(depth) + "; call backward first, or forward with save=False");
  const auto saved = save ? kept(args) : nullptr;
  auto job = std::make_shared<TrainingForwardJob>(state_, args, saved);
  pending_.reserve(pending_.size() + 1);  // nothing may fail once the job is queued
  team_->submit(job);
  if (saved) {
    pending_.push_back(saved);
    lost_ = false;
  }
  count();
  return job;
}

std::shared_ptr<sys::Job> TrainingLayer::submit_forward(const TrainingForwardArgs& args,
                                                        bool save) {
  const Lock lock = alone();
  return submit(args, save);
}

void TrainingLayer::forward(const TrainingForwardArgs& args, bool save) {
  const Lock lock = alone();
  submit(args, save)->wait();
}

SavedForward& TrainingLayer::newest() const {
  if (!pending_.empty()) return *pending_.back();
  throw std::runtime_error(
      lost_
          ? "the forward passes that waited for backward were lost when the process forked during "
            "a call of this layer; call forward again"
          : "no forward pass waits for backward; call forward with save=True first");
}

bool TrainingLayer::backward(const TrainingBackwardArgs& args, int64_t tokens) {
  const Lock lock = alone();
  SavedForward& saved = newest();
  if (saved.lost())
    throw std::runtime_error(
        "the newest forward pass was running when the process forked, and is lost in this process; "
        "call drop_newest, then forward again");
  need(tokens == saved.tokens, "grad_out has " + std::to_string(tokens) +
                                   " tokens; the newest forward pass had " +
                                   std::to_string(saved.tokens));
  need_loaded(*state_->layer);
  need_finite(*team_, args.grad_out, tokens, layer_config().hidden_size);
  saved.inverse_order = inverse_order(*state_->layer);  // experts may have been loaded since
  std::vector<FloatArray> written = written_by(args, tokens);
  const auto job = std::make_shared<TrainingBackwardJob>(state_, args, pending_.back());
  team_->submit(job);
  job->wait();
  const bool finite = all_finite(*team_, std::move(written));
  drop_last();
  return finite;
}

// The arrays that a backward pass writes to.
std::vector<FloatArray> TrainingLayer::written_by(const TrainingBackwardArgs& args,
                                                  int64_t tokens) const {
  const LayerConfig& c = layer_config();
  const int64_t rank = config().rank;
  std::vector<FloatArray> written{{args.grad_in, tokens * c.hidden_size, true},
                                  {args.grad_weights, tokens * c.top_k, false}};
  const auto add = [&](const float* values, int64_t n) {
    if (values) written.push_back({values, c.num_experts * n, false});
  };
  for (int m = 0; m < kMatrices; ++m) {
    add(args.grads.a[m], rank * (m == kDown ? c.intermediate_size : c.hidden_size));
    add(args.grads.b[m], rank * (m == kDown ? c.hidden_size : c.intermediate_size));
    add(args.grads.weight[m], c.hidden_size * c.intermediate_size);
  }
  return written;
}

void TrainingLayer::drop_last() {
  pending_.pop_back();
  count();
}

void TrainingLayer::drop_newest() {
  const Lock lock = alone();
  newest();
  drop_last();
}

void TrainingLayer::clear() {
  const Lock lock = alone();
  pending_.clear();
  count();
  spare_->clear();
}

void TrainingLayer::count() {
  count_ = int64_t(pending_.size());
  newest_tokens_ = pending_.empty() ? 0 : pending_.back()->tokens;
}

}  // namespace kt
