// Measures how the threads of a layer's team spend a forward pass. For benchmarks; off by default.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kt {

enum class Phase : int { kTokens, kGather, kGateUp, kQuantise, kDown, kFinish };
constexpr int kPhaseCount = 6;
constexpr const char* kPhaseNames[kPhaseCount] = {"tokens",   "gather", "gate_up",
                                                  "quantise", "down",   "finish"};

// Nanoseconds of one thread, by phase. Atomic, because they may be read during a pass.
struct alignas(128) ThreadTimes {
  std::atomic<int64_t> work[kPhaseCount] = {}, wait[kPhaseCount] = {};
};

class Timings {
 public:
  explicit Timings(int threads) : threads_(size_t(threads)) {}
  // Also resets all times. Affects passes that start afterwards.
  void set(bool on) {
    for (ThreadTimes& t : threads_)
      for (int p = 0; p < kPhaseCount; ++p) t.work[p] = t.wait[p] = 0;
    on_.store(on, std::memory_order_relaxed);
  }
  bool on() const { return on_.load(std::memory_order_relaxed); }
  ThreadTimes& thread(int number) { return threads_[size_t(number)]; }
  const std::vector<ThreadTimes>& threads() const { return threads_; }

 private:
  std::atomic<bool> on_{false};
  std::vector<ThreadTimes> threads_;
};

// One thread's stopwatch. Each call records the time since the previous one.
class StopWatch {
 public:
  StopWatch(Timings& timings, int thread)
      : times_(timings.on() ? &timings.thread(thread) : nullptr) {
    if (times_) last_ = Clock::now();
  }
  void worked(Phase phase) {
    if (times_) book(times_->work[int(phase)]);
  }
  void waited(Phase phase) {
    if (times_) book(times_->wait[int(phase)]);
  }

 private:
  using Clock = std::chrono::steady_clock;
  void book(std::atomic<int64_t>& total) {
    const Clock::time_point now = Clock::now();
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count();
    // Only this thread adds.
    total.store(total.load(std::memory_order_relaxed) + ns, std::memory_order_relaxed);
    last_ = now;
  }

  ThreadTimes* const times_;
  Clock::time_point last_;
};

}  // namespace kt
