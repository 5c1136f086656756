#include "forward.h"

#include <algorithm>
#include <utility>

#include "forward_pass.h"

namespace kt {
namespace {

constexpr int64_t kRowTask = 8;  // rows per task of the phases that only convert rows

}  // namespace

ForwardJob::ForwardJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args)
    : layer_(std::move(layer)), args_(args) {
  layer_->workspace->renew_after_fork();
}

void ForwardJob::run(sys::Worker& worker) noexcept { ForwardPass(*layer_, args_, worker).run(); }

ForwardPass::ForwardPass(LayerState& layer, const ForwardArgs& args, sys::Worker& worker)
    : layer_(layer),
      config_(layer.config),
      work_(*layer.workspace),
      args_(args),
      worker_(worker),
      space_(work_.thread[size_t(worker.rank)]),
      several_pools_(worker.team_threads != worker.pool_threads),
      rows_{layer, work_, {layer.kernels(kGate), layer.kernels(kUp), layer.kernels(kDown)}},
      watch_(layer.timings, worker.rank),
      phase_(work_.phase) {}

void ForwardPass::run() {
  if (!args_.tokens) return;
  config_.table->thread_begin();
  for (;;) {
    count_ = std::min(config_.max_tokens, args_.tokens - first_);
    chunk();
    first_ += count_;
    if (first_ == args_.tokens) break;
    barrier(plan_->few() ? Phase::kFinish : Phase::kDown,
            true);  // before the next chunk takes the buffers
  }
  config_.table->thread_end();
  // Every other thread read it before the last barrier, and reads it next in another job.
  if (worker_.rank == 0) work_.phase = phase_;
}

void ForwardPass::chunk() {
  own_ = count_ <= kOwnTokens && count_ * config_.top_k <= kFewIds;
  plan_ = own_ ? &space_.plan : &work_.plan;
  if (own_ || worker_.rank == 0) make_plan(own_ ? space_.plan : work_.plan);
  tokens();
  if (!own_) barrier(Phase::kTokens, true);
  if (gathers(kGate) || gathers(kUp)) {
    gather();
    barrier(Phase::kGather, true);
  }
  gate_up();
  // A whole row of h is in parts on the pools.
  barrier(Phase::kGateUp, any_whole_rows() && several_pools_);
  if (any_whole_rows() && !plan_->few()) {
    quantise_hidden();
    barrier(Phase::kQuantise, false);
  }
  own_h_ = nullptr;
  if (!plan_->few()) return down_by_group();
  down_by_expert();
  barrier(Phase::kDown, true);
  finish();
}

void ForwardPass::barrier(Phase phase, bool team) {
  team ? worker_.team_barrier() : worker_.pool_barrier();
  watch_.waited(phase);
}

sys::TaskPhase ForwardPass::tasks(sys::TaskSlot* slots, int threads, int self) {
  return {slots, threads, self, ++phase_, starts()};
}

// Among the threads of the pool, with `starts` as they are.
sys::TaskPhase ForwardPass::pool_tasks() {
  return tasks(work_.slots.data() + (worker_.rank - worker_.index), worker_.pool_threads,
               worker_.index);
}

// Among all threads, evenly.
sys::TaskPhase ForwardPass::team_tasks(int64_t n) {
  start_evenly(n, worker_.team_threads);
  return tasks(work_.slots.data(), worker_.team_threads, worker_.rank);
}

void ForwardPass::start_evenly(int64_t n, int threads) {
  for (int i = 0; i <= threads; ++i) starts()[i] = n * i / threads;
}

void ForwardPass::end(Phase phase, const sys::TaskPhase& done) {
  if (done.stolen()) layer_.stats.stolen_tasks.fetch_add(done.stolen(), std::memory_order_relaxed);
  watch_.worked(phase);
}

int64_t ForwardPass::gemm_min_rows(Matrix m) const {
  if (config_.kind == KernelKind::kVector) return INT64_MAX;
  if (config_.kind == KernelKind::kTile) return 1;
  const int64_t tuned = config_.tuning.gemm_min_rows[m];
  return tuned ? tuned : rows_.kernels[m].gemm_min_rows;
}

int64_t ForwardPass::row_block() const {
  return config_.tuning.row_block ? config_.tuning.row_block : kRowBlock;
}

bool ForwardPass::any_whole_rows() const {
  const FormatKernels& down = rows_.kernels[kDown];
  return down.gemv.act == ActKind::kInt8Row ||
         (plan_->any_gemm(kDown) && down.gemm.act == ActKind::kInt8Row);
}

void ForwardPass::make_plan(Plan& plan) {
  const int64_t k = config_.top_k;
  plan.build({args_.ids + first_ * k,
              args_.weights + first_ * k,
              count_,
              k,
              layer_.on_cpu,
              {gemm_min_rows(kGate), gemm_min_rows(kUp), gemm_min_rows(kDown)},
              expert_groups(config_.num_experts, config_.hidden_size)});
  if (worker_.rank != 0) return;
  LayerStats& stats = layer_.stats;
  for (int64_t i = 0; i < plan.active(); ++i)
    ++(plan.expert(i).any_gemm() ? stats.tile_calls : stats.vector_calls);
  if (first_ == 0) ++stats.forwards;
  stats.tokens += count_;
  stats.expert_calls += plan.pairs();
  stats.experts_touched += plan.active();
}

// The rows of `layer`'s x, of any dtype, to those that GEMV kernels read.
void ForwardPass::tokens() {
  const ActRows x = x_of_tokens(kGate), x_of_up = x_of_tokens(kUp);
  const auto convert_for = [&](Matrix m, const ActRows& to, int64_t t) {
    rows_.quantise(rows_.kernels[m].gemv.act, rows_.source_row(args_, first_ + t), args_.dtype,
                   config_.hidden_size, rows_.x_columns(), -1, to, t);
  };
  const auto convert = [&](int64_t t) {
    convert_for(kGate, x, t);
    if (!rows_.shares_tokens()) convert_for(kUp, x_of_up, t);
  };
  if (layer_.order.any) return;  // all rows are gathered
  if (own_) {
    for (int64_t t = 0; t < count_; ++t) convert(t);
    watch_.worked(Phase::kTokens);
    return;
  }
  sys::TaskPhase tasks = team_tasks(ceil_div(count_, kRowTask));
  for (sys::TaskRange r; !(r = tasks.claim(4)).empty();)
    for (int64_t t = r.first * kRowTask; t < std::min(r.last * kRowTask, count_); ++t) convert(t);
  end(Phase::kTokens, tasks);
}

// Whether an expert has x rows of its own for this matrix.
bool ForwardPass::gathers(Matrix m) const {
  return layer_.order.any || (plan_->any_gemm(m) && rows_.gemm_gathers(m));
}

void ForwardPass::gather() {
  const int64_t rows = plan_->few() ? 1 : kRowTask;
  sys::TaskPhase tasks = team_tasks(ceil_div(plan_->pairs(), rows));
  for (sys::TaskRange r; !(r = tasks.claim(4)).empty();)
    plan_->each_expert(r.first * rows, r.last * rows,
                       [&](const ExpertRows& e, int64_t first, int64_t last) {
                         const bool gate = rows_.gathers(e, kGate);
                         const bool up = rows_.gathers(e, kUp) && !rows_.shares_gathered(e);
                         for (int64_t pair = first; (gate || up) && pair < last; ++pair) {
                           if (gate) gather_row(e, kGate, pair);
                           if (up) gather_row(e, kUp, pair);
                         }
                       });
  end(Phase::kGather, tasks);
}

void ForwardPass::gather_row(const ExpertRows& e, Matrix m, int64_t pair) {
  const ProductKernel& kernel = rows_.kernel(e, m);
  const ActRows to = rows_.gathered(e, m);
  const int64_t t = plan_->tokens()[pair], row = pair - e.first;
  const void* source = rows_.source_row(args_, first_ + t);
  if (layer_.order.any) source = in_order(e, m, source);
  if (!kernel.blocked) {
    rows_.quantise(kernel.act, source, args_.dtype, config_.hidden_size, rows_.x_columns(), -1, to,
                   row);
    return;
  }
  ActRows one = to.from(row);  // a contiguous row first
  one.data = space_.row;
  if (!layer_.order.any && kernel.act == rows_.kernels[m].gemv.act) {
    const ActRows x = x_of_tokens(m);
    one.data = x.data + t * x.stride;
    std::copy_n(x.scale + t * x.scales, x.scales, const_cast<float*>(one.scale));
    std::copy_n(x.sum + t * x.sums, x.sums, const_cast<int32_t*>(one.sum));
  } else {
    rows_.quantise(kernel.act, source, args_.dtype, config_.hidden_size, rows_.x_columns(), -1, one,
                   0);
  }
  copy_to_blocks(one.data, to.stride, const_cast<uint8_t*>(to.data), row);
}

// A row of x with the columns of the expert's matrix.
const void* ForwardPass::in_order(const ExpertRows& e, Matrix m, const void* row) {
  const int32_t* order = layer_.order.row(layer_.position[size_t(e.slot)], m);
  const auto permute = [&]<class T>(const T* from) {
    auto* to = reinterpret_cast<T*>(space_.ordered);
    for (int64_t k = 0; k < config_.hidden_size; ++k) to[k] = from[order[k]];
  };
  if (args_.dtype == DType::kFP32)
    permute(static_cast<const uint32_t*>(row));
  else
    permute(static_cast<const uint16_t*>(row));
  return space_.ordered;
}

void ForwardPass::quantise_hidden() {
  const int64_t n = part().size ? ceil_div(plan_->pairs(), kRowTask) : 0;
  start_evenly(n, worker_.pool_threads);
  sys::TaskPhase tasks = pool_tasks();
  for (sys::TaskRange r; !(r = tasks.claim(4)).empty();)
    plan_->each_expert(r.first * kRowTask, r.last * kRowTask,
                       [&](const ExpertRows& e, int64_t first, int64_t last) {
                         if (!whole_rows(e)) return;
                         const ActRows h = rows_.h(worker_.pool, e);
                         for (int64_t pair = first; pair < last; ++pair)
                           quantise_h_row(e, h, pair - e.first);
                       });
  end(Phase::kQuantise, tasks);
}

}  // namespace kt
