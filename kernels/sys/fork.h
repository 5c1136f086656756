// Detects forks, and guards state that a forked child must reset before it uses it.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace kt::sys {

// The number of forks between the process that loaded the library and this one. Objects created
// under another number belong to threads that do not exist in this process, and their mutexes may
// be locked forever.
uint32_t forks();

// Guards state that several threads change in steps. A child has the state that its parent had at
// the fork, possibly in the middle of a step that will never be completed. Each process therefore
// resets it before its first use.
//
// A mutex would not do: a fork could leave it locked in the child.
class PerProcess {
 public:
  // ready: whether the state is good for the process that constructs it. Otherwise the first
  // ensure() of that process resets it, too.
  explicit PerProcess(bool ready) : mark_(ready ? done() : kNever) {}

  // Whether ensure() has returned in this process, or the state was ready on construction.
  bool ready() const { return mark_.load(std::memory_order_acquire) == done(); }

  // Calls renew() unless the state is ready. Other threads wait until it has returned, and see what
  // it wrote. If it throws, the next caller tries again.
  template <class Renew> void ensure(Renew renew) {
    while (!ready()) {
      uint32_t mark = mark_.load(std::memory_order_relaxed);
      // A mark of another process, busy or done, means nothing here.
      if (mark == busy()) {
        sched_yield();
      } else if (mark != done() &&
                 mark_.compare_exchange_strong(mark, busy(), std::memory_order_acquire)) {
        try {
          renew();
        } catch (...) {
          mark_.store(kNever, std::memory_order_release);
          throw;
        }
        mark_.store(done(), std::memory_order_release);
      }
    }
  }

 private:
  static constexpr uint32_t kNever = 0;
  static uint32_t busy() { return 2 * forks() + 1; }
  static uint32_t done() { return 2 * forks() + 2; }

  std::atomic<uint32_t> mark_;
};

// A lock for std::unique_lock with std::try_to_lock: a second thread is refused, it never waits. If
// a thread of the parent process holds it at a fork, it is free in the child, which does not have
// that thread. A mutex would stay locked.
class ForkSafeLock {
 public:
  bool try_lock() {
    const uint32_t mine = forks() + 1;
    uint32_t holder = holder_.load(std::memory_order_relaxed);
    if (holder == mine || !holder_.compare_exchange_strong(holder, mine, std::memory_order_acquire))
      return false;
    taken_over_ = holder != kNobody;
    return true;
  }
  void unlock() { holder_.store(kNobody, std::memory_order_release); }

  // Only the holder may ask. True if a thread of the parent process held the lock at the fork: what
  // the lock guards may be in the middle of a change that this process never completes.
  bool taken_over() const { return taken_over_; }

 private:
  static constexpr uint32_t kNobody = 0;
  std::atomic<uint32_t> holder_{kNobody};  // forks() + 1 of the holder's process
  bool taken_over_ = false;
};

}  // namespace kt::sys
