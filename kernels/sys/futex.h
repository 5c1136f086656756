// Sleeping on a 32-bit word, and spinning for a limited time before that.
#pragma once
#include <emmintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace kt::sys {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "the kernel reads the word inside the atomic");

// Sleeps while *word == expected. May return early (a signal, a spurious wake-up, a changed word),
// so the caller must check the word in a loop.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

// As futex_wait, for at most `time`.
inline void futex_wait_for(std::atomic<uint32_t>* word, uint32_t expected,
                           std::chrono::nanoseconds time) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  const timespec limit{seconds.count(), (time - seconds).count()};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, &limit, nullptr, 0);
}

// Uses only the address, never the memory behind it.
inline void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Polls ready() with pauses for about `budget`; returns whether it became true.
template <class Ready> bool spin_until(Ready ready, std::chrono::nanoseconds budget) {
  if (ready()) return true;
  const auto end = std::chrono::steady_clock::now() + budget;
  do {
    // A pause takes 40 to 140 cycles, and reading the clock about as many, so it is read rarely.
    for (int i = 0; i < 16; ++i) {
      _mm_pause();
      if (ready()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace kt::sys
