// One worker's view of a forward pass: the phases, and what they share.
#pragma once
#include "act_rows.h"
#include "forward.h"
#include "plan.h"

namespace kt {

// Phases, each shared among the threads as tasks that they take from each other when they run out,
// with a barrier between them:
//   tokens    x rows to A rows; thread 0 makes the plan (tokens -> experts). With few tokens every
//             thread does both for itself, without a barrier
//   gather    A rows of the experts that go to a GEMM kernel, where it wants others than the GEMV
//             kernel, and of all experts where their columns have orders (act-order)
//   gate_up   gate, up, activation: tiles of all experts; h to A rows
//   quantise  activations with one scale per row: h rows to A rows once the whole row is there. Few
//             pairs: as part of the next phase, by every thread for the experts it has tiles of
//   down      few pairs: tasks are (expert, tile) and keep every pair's result. Else: tasks are
//             (group of experts, tile) and sum in their own tile of the group's sums; whoever
//             completes the last group of a tile finishes it
//   finish    sums over pairs, groups, pools, what the layer before deferred; one rounding
// No data is shared between tasks of a phase, and every sum has one order: see plan.h.
class ForwardPass {
 public:
  ForwardPass(LayerState& layer, const ForwardArgs& args, sys::Worker& worker);
  void run();

 private:
  // Tasks of one phase; the numbers of all threads' phases go together.
  sys::TaskPhase pool_tasks();
  sys::TaskPhase team_tasks(int64_t tasks);
  sys::TaskPhase tasks(sys::TaskSlot* slots, int threads, int self);
  int64_t* starts() { return space_.starts.data(); }
  void start_evenly(int64_t tasks, int threads);
  void end(Phase phase, const sys::TaskPhase& tasks);

  void barrier(Phase phase, bool team);
  void chunk();
  void make_plan(Plan& plan);
  void tokens();
  void gather();
  bool gathers(Matrix m) const;
  void gather_row(const ExpertRows& e, Matrix m, int64_t pair);
  const void* in_order(const ExpertRows& e, Matrix m, const void* row);
  void gate_up();
  void gate_up_tiles(const WorkItem& item, int64_t first, int64_t last);
  void keep_h(const ExpertRows& e, const float* values, int64_t first, int64_t m, int64_t tile);
  void quantise_hidden();
  void quantise_h_row(const ExpertRows& e, const ActRows& h, int64_t row);
  void down_by_expert();
  void down_of_expert(const ExpertRows& e, int64_t first, int64_t last);
  template <class F>
  void down_products(const ExpertRows& e, const ActRows& h, int64_t first, int64_t last, F keep);
  void down_by_group();
  void down_of_group(int64_t group, int64_t first, int64_t last);
  void add_rows(int pool, const ExpertRows& e, int64_t first, int64_t m, int64_t tile,
                const float* results, float* sum) const;
  void sum_done(int64_t tile, int sums);
  void finish();
  void finish_tile(int64_t tile);
  void sum_pairs(int pool, int64_t group, int64_t tile);

  int64_t gemm_min_rows(Matrix m) const;
  int64_t row_block() const;
  int64_t tiles_at_once(int64_t tile_bytes) const;
  int64_t tile_cost(const WorkItem& item, Matrix m) const;
  ActRows x_of_tokens(Matrix m) const {
    return own_ ? rows_.x_of_tokens(m, space_) : rows_.x_of_tokens(m);
  }
  ActRows x_rows(const ExpertRows& e, Matrix m) const;
  // Whether rows of h have one scale, which comes from all of I.
  bool whole_rows(const ExpertRows& e) const {
    return rows_.kernel(e, kDown).act == ActKind::kInt8Row;
  }
  bool any_whole_rows() const;
  const PoolPart& part() const { return layer_.pools[size_t(worker_.pool)]; }
  float* sum_of(int pool, int64_t group, int64_t tile) const;
  float* results_of(int pool, const ExpertRows& e, int64_t tile) const;
  // The expert's h rows, of few pairs.
  ActRows h_for_down(const ExpertRows& e);

  LayerState& layer_;
  const LayerConfig& config_;
  Workspace& work_;
  const ForwardArgs& args_;
  sys::Worker& worker_;
  ThreadSpace& space_;
  const bool several_pools_;
  ActRowBuffers rows_;
  StopWatch watch_;
  uint16_t phase_;

  // Of the present chunk.
  int64_t first_ = 0, count_ = 0;  // tokens
  const Plan* plan_ = nullptr;
  bool own_ = false;                   // every thread has a plan and x rows of its own
  const ExpertRows* own_h_ = nullptr;  // whose h rows are in space_
};

// Calls f(segment, first, last) for each part of the range in one segment of `size` tasks.
template <class F> void each_segment(const sys::TaskRange& r, int64_t size, F f) {
  for (int64_t task = r.first; task < r.last;) {
    const int64_t segment = task / size, begin = segment * size;
    const int64_t last = begin + size < r.last ? begin + size : r.last;
    f(segment, task - begin, last - begin);
    task = last;
  }
}

}  // namespace kt
