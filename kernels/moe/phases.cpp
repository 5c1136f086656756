#include "phases.h"

namespace kt {
namespace {

int64_t gemm_min_rows(const LayerState& layer, Matrix m) {
  const LayerConfig& c = layer.config;
  if (c.kind == KernelKind::kVector) return INT64_MAX;
  if (c.kind == KernelKind::kTile) return 1;
  return c.tuning.gemm_min_rows[m] ? c.tuning.gemm_min_rows[m] : layer.kernels(m).gemm_min_rows;
}

void count(LayerStats& stats, const Chunk& chunk, const Plan& plan) {
  for (int64_t i = 0; i < plan.active(); ++i)
    ++(plan.expert(i).any_gemm() ? stats.tile_calls : stats.vector_calls);
  if (chunk.first == 0) ++stats.forwards;
  stats.tokens += chunk.count;
  stats.expert_calls += plan.pairs();
  stats.experts_touched += plan.active();
}

}  // namespace

void make_plan(const LayerState& layer, const std::vector<uint8_t>& on_cpu, const int64_t* ids,
               const float* weights, int64_t tokens, Plan& plan) {
  const LayerConfig& c = layer.config;
  plan.build({ids,
              weights,
              tokens,
              c.top_k,
              on_cpu,
              {gemm_min_rows(layer, kGate), gemm_min_rows(layer, kUp), gemm_min_rows(layer, kDown)},
              expert_groups(c.num_experts, c.hidden_size)});
}

Chunk chunk_at(const LayerState& layer, const ForwardArgs& args, int64_t first) {
  const int64_t tokens = std::min(layer.config.max_tokens, args.tokens - first);
  return {args, first, tokens, tokens <= kOwnTokens && tokens * layer.config.top_k <= kFewIds};
}

const Plan& start_chunk(Pass& pass, const Chunk& chunk, const XRows& x) {
  Plan& plan = chunk.own ? pass.space.plan : pass.work.plan;
  const bool first = pass.worker.rank == 0;
  if (chunk.own || first) {
    const int64_t skipped = chunk.first * pass.layer.config.top_k;
    make_plan(pass.layer, pass.layer.on_cpu, chunk.args.ids + skipped, chunk.args.weights + skipped,
              chunk.count, plan);
  }
  if (first) count(pass.layer.stats, chunk, plan);
  const auto convert = [&](int64_t from, int64_t to) { x.convert(from, to); };
  if (chunk.own) {
    convert(0, chunk.count);
    pass.worked(Phase::kTokens);
  } else {
    pass.even_phase(Phase::kTokens, pass.team(), chunk.count, kRowTask, convert);
    pass.team_barrier();
  }
  return plan;
}

Phases::Phases(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x)
    : pass_(pass),
      layer_(pass.layer),
      config_(layer_.config),
      pool_(pass.worker.pool),
      chunk_(chunk),
      plan_(plan),
      x_(x),
      h_(pass) {}

void Phases::gather(int64_t pairs) {
  if (!x_.gathers(plan_)) return;
  pass_.even_phase(
      Phase::kGather, pass_.team(), plan_.pairs(), pairs, [&](int64_t first, int64_t last) {
        plan_.each_expert(first, last, [&](const ExpertRows& e, int64_t begin, int64_t end) {
          x_.gather(plan_, e, begin, end);
        });
      });
  pass_.team_barrier();
}

void Phases::gate_up(int64_t tiles) {
  gate_up_products(
      tiles, [&](const ExpertRows& e, float* gate, float* up, int64_t r, int64_t m, int64_t tile) {
        const int64_t column = part().begin + tile * kTileRows;
        const float* gate_bias = layer_.bias_of(kGate, e.slot);
        const float* up_bias = layer_.bias_of(kUp, e.slot);
        // A product of w * x is w times the product of x.
        config_.table->activate(
            part().has_gate() ? gate : nullptr, up, gate_bias ? gate_bias + column : nullptr,
            up_bias ? up_bias + column : nullptr,
            config_.weight_on_input ? router_weights(e, r) : nullptr, config_.activation, m, gate);
        h_.keep(e, gate, r, m, tile);
      });
  // A pool reads its own part of h. Only whole rows have parts in all pools.
  h_.any_whole(plan_) && layer_.pools.size() > 1 ? pass_.team_barrier() : pass_.pool_barrier();
}

void Phases::add_rows(int pool, const ExpertRows& e, int64_t first, int64_t m, int64_t tile,
                      const float* results, float* sum) const {
  // The bias must be added once, so the pool with the first part of I adds it.
  const float* bias =
      layer_.pools[size_t(pool)].begin == 0 ? layer_.bias_of(kDown, e.slot) : nullptr;
  config_.table->merge(results, bias ? bias + tile * kTileRows : nullptr,
                       config_.weight_on_input ? nullptr : router_weights(e, first),
                       plan_.tokens() + e.first + first, m, sum);
}

float* Phases::new_sum(int pool, int64_t group, int64_t tile) const {
  float* sum = sum_of(layer_, plan_, chunk_, pool, group, tile);
  std::fill_n(sum, chunk_.count * kTileRows, 0.0f);
  return sum;
}

float* sum_of(const LayerState& layer, const Plan& plan, const Chunk& chunk, int pool,
              int64_t group, int64_t tile) {
  return as<float>(layer.workspace->sum[size_t(pool)]) +
         (tile * plan.groups() + group) * chunk.count * kTileRows;
}

void finish_tile(const LayerState& layer, const Plan& plan, const Chunk& chunk, int64_t tile) {
  const LayerConfig& c = layer.config;
  const float* sum[kMaxPools * kMaxGroups];
  int sums = 0;
  for (int p = 0; p < int(layer.pools.size()); ++p)
    for (int64_t g = 0; layer.pools[size_t(p)].size && g < plan.groups(); ++g)
      sum[sums++] = sum_of(layer, plan, chunk, p, g, tile);
  const ForwardArgs& args = chunk.args;
  const DType dtype = args.partial ? DType::kFP32 : args.dtype;
  auto* out = static_cast<uint8_t*>(args.partial ? args.partial : args.out);
  const int64_t column = tile * kTileRows, n = std::min(kTileRows, c.hidden_size - column);
  for (int64_t t = 0; t < chunk.count; ++t) {
    const int64_t at = (chunk.first + t) * c.hidden_size + column;
    c.table->finish(sum, sums, args.add ? args.add + at : nullptr, n, out + at * dtype_bytes(dtype),
                    dtype);
    for (int i = 0; i < sums; ++i) sum[i] += kTileRows;
  }
}

}  // namespace kt
