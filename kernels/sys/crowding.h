// Detects whether other processes need the CPUs on which the library's threads spin.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kt::sys {

// After an interrupted spin, threads sleep for a while: 1 ms at first, doubling with each further
// interruption that follows soon, up to 50 ms. Occasional interruptions are normal and should not
// cost many sleeps: a sleeping virtual CPU may take far longer to return than a futex call.
//
// Thread-safe. All operations are relaxed, because the result only affects how to wait.
class Crowding {
 public:
  // Records that a spin looked at the clock (now_ns, futex.h) at `before` and again now.
  void spun(int64_t before, int64_t now) {
    if (now - before <= kInterruptedNs) return;
    const int64_t until = until_.load(std::memory_order_relaxed);
    if (now < until) return;
    const int64_t last = length_.load(std::memory_order_relaxed);
    const bool again = last != 0 && now - until < kSoon * last;
    const int64_t length = again ? std::min(2 * last, kLongestNs) : kShortestNs;
    length_.store(length, std::memory_order_relaxed);
    until_.store(now + length, std::memory_order_relaxed);
  }
  bool at(int64_t now) const { return now < until_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kInterruptedNs = 200'000;  // far longer than between two looks
  static constexpr int64_t kShortestNs = 1'000'000, kLongestNs = 50'000'000;
  static constexpr int64_t kSoon = 8;  // in lengths of the last sleep
  std::atomic<int64_t> until_{0}, length_{0};
};

}  // namespace kt::sys
