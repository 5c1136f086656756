#include "forward.h"

#include <utility>

#include "drivers.h"
#include "phases.h"

namespace kt {
namespace {

// Of the experts that the CPU has now: a queued job may change them before the pass runs, whose
// driver then runs on more or fewer threads than it would have.
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
    if (first) pass.team_barrier();  // before the chunk takes the buffers of the one before
    const Chunk chunk = chunk_at(*layer_, args_, first);
    const XRows x(pass, chunk);
    const Plan& plan = start_chunk(pass, chunk, x);
    (plan.pairs() <= kFewPairs ? decode : prefill)(pass, chunk, plan, x);
  }
  pass.end();
  c.table->thread_end();
}

}  // namespace kt
