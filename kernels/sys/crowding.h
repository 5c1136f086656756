// Whether other processes want the CPUs on which threads of ours spin.
#pragma once
#include <atomic>
#include <cstdint>

namespace kt::sys {

// From any thread. relaxed everywhere: it only says how to wait.
class Crowding {
 public:
  // Of a spin that looked at the clock (now_ns, futex.h) at `before` and again now. Where the
  // system took the CPU from it meanwhile, spins will be interrupted for a while.
  void spun(int64_t before, int64_t now) {
    if (now - before > kInterruptedNs) until_.store(now + kCrowdedNs, std::memory_order_relaxed);
  }
  bool at(int64_t now) const { return now < until_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kInterruptedNs = 200'000;  // far longer than between two looks
  static constexpr int64_t kCrowdedNs = 50'000'000;
  std::atomic<int64_t> until_{0};
};

}  // namespace kt::sys
