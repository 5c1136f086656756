// One worker's part in a pass over a layer: its tasks in each phase, and the barriers.
#pragma once
#include <algorithm>

#include "state.h"

namespace kt {

// In each phase, the threads share tasks and steal from each other when they run out. The tasks of
// a phase share no data, and there is a barrier between phases that depend on each other.
class Pass {
 public:
  Pass(LayerState& state, sys::Worker& w)
      : layer(state),
        work(*state.workspace),
        worker(w),
        space(work.thread[size_t(w.thread)]),
        kernels{state.kernels(kGate), state.kernels(kUp), state.kernels(kDown)},
        watch_(state.timings, w.thread),
        number_(work.phase) {}

  LayerState& layer;
  Workspace& work;
  sys::Worker& worker;
  ThreadSpace& space;
  const ByMatrix<FormatKernels> kernels;  // copies, so that they are adjacent in memory

  const ProductKernel& kernel(const ExpertRows& e, Matrix m) const {
    return e.gemm[m] ? kernels[m].gemm : kernels[m].gemv;
  }
  // The part of the layer in this worker's pool.
  const PoolPart& part() const { return layer.pools[size_t(worker.pool)]; }

  // The last call of a pass. There must be a barrier between the last phase and the next pass.
  void end() const {
    if (worker.rank != 0) return;
    // The other threads have read it before the last barrier, and read it next in another job.
    work.phase = number_;
    // A lean pass uses the first slots. No thread reads the others before another job.
    for (size_t i = size_t(worker.team_threads); i < work.slots.size(); ++i)
      work.slots[i].skip_to(number_);
  }

  // The threads that share a phase.
  struct Threads {
    sys::TaskSlot* slots;
    int count, self;
  };
  Threads team() const { return {work.slots.data(), worker.team_threads, worker.rank}; }
  Threads pool() const {
    return {work.slots.data() + (worker.rank - worker.index), worker.pool_threads, worker.index};
  }

  // Calls f(first, last) for parts of 0..n-1, in tasks of `size`.
  template <class F>
  void even_phase(Phase phase, const Threads& among, int64_t n, int64_t size, F f) {
    split(among, ceil_div(n, size));
    run(phase, among, 4,
        [&](const sys::TaskRange& r) { f(r.first * size, std::min(r.last * size, n)); });
  }
  // Calls f(segment, first, last) for parts of the segments 0..segments-1, which have `size` tasks
  // each, shared among the threads of the pool. cost(segment) is the cost of each of its tasks. A
  // thread takes at most `most` tasks at a time.
  template <class Cost, class F>
  void costed_phase(Phase phase, int64_t segments, int64_t size, Cost cost, int64_t most, F f) {
    split(pool(), segments, size, cost);
    run(phase, pool(), most, [&](sys::TaskRange r) {
      while (!r.empty()) {
        const int64_t segment = r.first / size, begin = segment * size;
        const int64_t last = std::min(begin + size, r.last);
        f(segment, r.first - begin, last - begin);
        r.first = last;
      }
    });
  }

  // A phase in two steps, for passes whose time is not recorded: `split` gives each thread its
  // tasks, then `share` runs them.
  //
  // Splits the tasks evenly.
  void split(const Threads& among, int64_t tasks) {
    for (int i = 0; i <= among.count; ++i) space.starts[size_t(i)] = tasks * i / among.count;
  }
  // Splits `size` tasks of each segment by cost(segment), which is the cost of each of its tasks.
  template <class Cost>
  void split(const Threads& among, int64_t segments, int64_t size, Cost cost) {
    int64_t total = 0;
    for (int64_t i = 0; i < segments; ++i) total += size * cost(i);
    sys::TaskSplit shares(total, among.count, space.starts.data());
    for (int64_t i = 0; size && i < segments; ++i) shares.add(size, cost(i));
    shares.end();
  }
  // Calls f(range) for this thread's tasks, then for stolen ones, at most `most` at a time. Returns
  // the number of stolen tasks.
  template <class F> int64_t share(const Threads& among, int64_t most, F f) {
    sys::TaskPhase tasks(among.slots, among.count, among.self, ++number_, space.starts.data());
    for (sys::TaskRange r; !(r = tasks.claim(most)).empty();) f(r);
    return tasks.stolen();
  }

  // Records the time since the last phase or barrier.
  void worked(Phase phase) {
    watch_.worked(phase);
    last_ = phase;
  }
  void team_barrier() {
    worker.team_barrier();
    watch_.waited(last_);
  }
  void pool_barrier() {
    worker.pool_barrier();
    watch_.waited(last_);
  }

 private:
  template <class F> void run(Phase phase, const Threads& among, int64_t most, F f) {
    const int64_t stolen = share(among, most, f);
    if (stolen) layer.stats.stolen_tasks.fetch_add(stolen, std::memory_order_relaxed);
    worked(phase);
  }

  StopWatch watch_;
  Phase last_ = Phase::kTokens;
  uint16_t number_;  // of the slots' last phase
};

}  // namespace kt
