#include "forward.h"

#include <utility>

#include "drivers.h"
#include "phases.h"

namespace kt {
namespace {

// Uses the experts that the CPU holds now. A queued job may change them before the pass runs; its
// driver then runs on more or fewer threads than is best for it.
bool is_lean(LayerState& layer, const ForwardArgs& args) {
  const LayerConfig& c = layer.config;
  return args.tokens <= c.max_tokens &&
         !more_pairs_than(kFewPairs, args.ids, args.tokens * c.top_k, layer.on_cpu);
}

}  // namespace

ForwardJob::ForwardJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args)
    : Job(is_lean(*layer, args)), layer_(std::move(layer)), args_(args) {
  layer_->workspace->renew_after_fork();
}

void ForwardJob::run(sys::Worker& worker) noexcept {
  if (!args_.tokens) return;
  const LayerConfig& c = layer_->config;
  c.table->thread_begin();
  Pass pass(*layer_, worker);
  for (int64_t first = 0; first < args_.tokens; first += c.max_tokens) {
    if (first) pass.team_barrier();  // the chunk reuses the buffers of the previous one
    const Chunk chunk = chunk_at(*layer_, args_, first);
    const XRows x(pass, chunk);
    const Plan& plan = start_chunk(pass, chunk, x);
    (plan.pairs() <= kFewPairs ? decode : prefill)(pass, chunk, plan, x);
  }
  pass.end();
  c.table->thread_end();
}

}  // namespace kt
