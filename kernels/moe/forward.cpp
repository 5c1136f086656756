#include "forward.h"

#include <algorithm>
#include <utility>

#include "decode.h"
#include "prefill.h"

namespace kt {
namespace {

// Every thread makes the plan and the rows of x of so few tokens for itself: cheaper than a
// barrier.
bool own_plan(int64_t tokens, int64_t top_k) {
  return tokens <= kOwnTokens && tokens * top_k <= kFewIds;
}

// Which driver computes a chunk.
bool is_decode(const Plan& plan) { return plan.pairs() <= kFewPairs; }

int64_t gemm_min_rows(const LayerState& layer, Matrix m) {
  const LayerConfig& c = layer.config;
  if (c.kind == KernelKind::kVector) return INT64_MAX;
  if (c.kind == KernelKind::kTile) return 1;
  return c.tuning.gemm_min_rows[m] ? c.tuning.gemm_min_rows[m] : layer.kernels(m).gemm_min_rows;
}

void make_plan(const LayerState& layer, const Chunk& chunk, Plan& plan) {
  const LayerConfig& c = layer.config;
  plan.build({chunk.args.ids + chunk.first * c.top_k,
              chunk.args.weights + chunk.first * c.top_k,
              chunk.count,
              c.top_k,
              layer.on_cpu,
              {gemm_min_rows(layer, kGate), gemm_min_rows(layer, kUp), gemm_min_rows(layer, kDown)},
              expert_groups(c.num_experts, c.hidden_size)});
  if (!is_decode(plan)) plan.cut_items();
}

void count(LayerStats& stats, const Chunk& chunk, const Plan& plan) {
  for (int64_t i = 0; i < plan.active(); ++i)
    ++(plan.expert(i).any_gemm() ? stats.tile_calls : stats.vector_calls);
  if (chunk.first == 0) ++stats.forwards;
  stats.tokens += chunk.count;
  stats.expert_calls += plan.pairs();
  stats.experts_touched += plan.active();
}

// The chunk's plan and its rows of x.
const Plan& start(Pass& pass, const Chunk& chunk, const XRows& x) {
  Plan& plan = chunk.own ? pass.space.plan : pass.work.plan;
  const bool first = pass.worker.rank == 0;
  if (chunk.own || first) make_plan(pass.layer, chunk, plan);
  if (first) count(pass.layer.stats, chunk, plan);
  const auto convert = [&](int64_t from, int64_t to) { x.convert(from, to); };
  if (chunk.own) {
    pass.own_phase(Phase::kTokens, [&] { convert(0, chunk.count); });
  } else {
    pass.team_phase(Phase::kTokens, chunk.count, kRowTask, convert);
    pass.team_barrier();
  }
  return plan;
}

}  // namespace

ForwardJob::ForwardJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args)
    : layer_(std::move(layer)), args_(args) {
  layer_->workspace->renew_after_fork();
}

void ForwardJob::run(sys::Worker& worker) noexcept {
  if (!args_.tokens) return;
  const LayerConfig& c = layer_->config;
  c.table->thread_begin();
  Pass pass(*layer_, worker);
  for (int64_t first = 0; first < args_.tokens; first += c.max_tokens) {
    if (first) pass.team_barrier();  // before the chunk takes the buffers of the one before
    const int64_t tokens = std::min(c.max_tokens, args_.tokens - first);
    const Chunk chunk{args_, first, tokens, own_plan(tokens, c.top_k)};
    const XRows x(pass, chunk);
    const Plan& plan = start(pass, chunk, x);
    if (is_decode(plan))
      Decode(pass, chunk, plan, x).run();
    else
      Prefill(pass, chunk, plan, x).run();
  }
  pass.end();
  c.table->thread_end();
}

}  // namespace kt
