// The tasks of one phase of a job, shared among threads: contiguous ranges with stealing at the
// tail.
#pragma once
#include <atomic>
#include <cstdint>

namespace kt::sys {

// Tasks of a phase are numbered from 0. This is the maximum number of tasks.
constexpr int64_t kMaxTasks = (int64_t{1} << 24) - 1;

// The remaining tasks of a thread, { phase : 16, end : 24, next : 24 }, in one word, so that the
// owner (at the front) and thieves (at the tail) never take the same task. It takes two cache
// lines, because the adjacent-line prefetcher moves lines in pairs.
struct alignas(128) TaskSlot {
  static constexpr int kBits = 24;
  std::atomic<uint64_t> word{0};

  // Makes the slot look as if its thread had taken part in all phases up to this one.
  void skip_to(uint16_t phase) {
    word.store(uint64_t{phase} << (2 * kBits), std::memory_order_relaxed);
  }
};

// Tasks [first, last).
struct TaskRange {
  int64_t first, last;
  bool empty() const { return first == last; }
};

// One phase, as seen by one of its threads. Thread i owns the tasks [starts[i], starts[i + 1]). All
// threads must use the same starts and phase number, and no thread may still be in another phase of
// the same slots. Phase numbers increase by one (modulo 2^16), and every thread takes part in each
// phase, so a slot is at most one phase behind. The first thread to find such a slot, its owner or
// a thief, brings it up to date, so no thread waits for another. The slot of a thread that sits out
// phases must skip to the last of them before it is used again. Otherwise, 2^16 phases later, it
// would seem up to date with all its tasks done.
//
// The words only distribute numbers, so relaxed operations are enough. A barrier before the phase
// makes the inputs of tasks visible, and a barrier after it their results.
class TaskPhase {
 public:
  TaskPhase(TaskSlot* slots, int threads, int self, uint16_t phase, const int64_t* starts)
      : slots_(slots),
        starts_(starts),
        threads_(threads),
        self_(self),
        victim_(self),
        phase_(phase) {
    uint64_t word = slots_[self_].word.load(std::memory_order_relaxed);
    if (phase_of(word) != phase_)  // if the exchange fails, a thief has done it
      slots_[self_].word.compare_exchange_strong(word, fresh(self_), std::memory_order_relaxed);
  }

  // Takes at most `most` of the thread's own tasks in ascending order (fewer towards the end, so
  // that others can steal some), then single tasks of others, from the tail. Empty when all are
  // taken.
  TaskRange claim(int64_t most) {
    std::atomic<uint64_t>& own = slots_[self_].word;
    uint64_t word = own.load(std::memory_order_relaxed);
    while (next_of(word) < end_of(word)) {
      const int64_t left = end_of(word) - next_of(word), share = (left + 3) / 4;
      const int64_t n = share < most ? share : most;
      if (own.compare_exchange_weak(word, word + uint64_t(n), std::memory_order_relaxed))
        return {next_of(word), next_of(word) + n};
    }
    for (int tried = 0; tried < threads_;
         ++tried, victim_ = victim_ + 1 < threads_ ? victim_ + 1 : 0) {
      const int64_t task = steal(victim_);
      if (task >= 0) {
        ++stolen_;
        return {task, task + 1};
      }
    }
    return {0, 0};
  }

  int64_t stolen() const { return stolen_; }

 private:
  static constexpr int kBits = TaskSlot::kBits;
  static uint16_t phase_of(uint64_t word) { return uint16_t(word >> (2 * kBits)); }
  static int64_t end_of(uint64_t word) { return int64_t(word >> kBits) & kMaxTasks; }
  static int64_t next_of(uint64_t word) { return int64_t(word) & kMaxTasks; }
  uint64_t fresh(int thread) const {
    return uint64_t(phase_) << (2 * kBits) | uint64_t(starts_[thread + 1]) << kBits |
           uint64_t(starts_[thread]);
  }

  int64_t steal(int thread) {
    std::atomic<uint64_t>& theirs = slots_[thread].word;
    uint64_t word = theirs.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t now = phase_of(word) == phase_ ? word : fresh(thread);
      if (next_of(now) >= end_of(now)) return -1;
      if (theirs.compare_exchange_weak(word, now - (uint64_t{1} << kBits),
                                       std::memory_order_relaxed))
        return end_of(now) - 1;
    }
  }

  TaskSlot* const slots_;
  const int64_t* const starts_;
  const int threads_, self_;
  int victim_;
  const uint16_t phase_;
  int64_t stolen_ = 0;
};

// Splits tasks among threads by cost: starts[0 .. threads]. The tasks come in segments of `count`
// tasks with the same cost (>= 1), in the order of the calls of add. The total of count * cost must
// be known in advance.
class TaskSplit {
 public:
  TaskSplit(int64_t total_cost, int threads, int64_t* starts)
      : total_(total_cost), threads_(threads), starts_(starts) {
    starts_[0] = 0;
  }
  // A task belongs to the thread in whose share its cost begins.
  void add(int64_t count, int64_t cost) {
    for (; thread_ < threads_; ++thread_) {
      const int64_t bound = total_ * thread_ / threads_;
      if (bound > before_ + (count - 1) * cost) break;
      starts_[thread_] = first_ + (bound > before_ ? (bound - before_ + cost - 1) / cost : 0);
    }
    first_ += count;
    before_ += count * cost;
  }
  void end() {
    for (; thread_ <= threads_; ++thread_) starts_[thread_] = first_;
  }

 private:
  const int64_t total_;
  const int threads_;
  int64_t* const starts_;
  int thread_ = 1;
  int64_t first_ = 0, before_ = 0;  // tasks and cost of the segments so far
};

}  // namespace kt::sys
