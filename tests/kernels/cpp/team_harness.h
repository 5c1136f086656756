// Shared by the tests of kernels/sys that run a team: checks that print and count, and functions as
// jobs.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "sys/team.h"

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true, kSanitizer = true;
#elif defined(__SANITIZE_ADDRESS__)
constexpr bool kThreadSanitizer = false, kSanitizer = true;
#else
constexpr bool kThreadSanitizer = false, kSanitizer = false;
#endif

inline std::atomic<int> g_failures{0};

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      ++g_failures;                                                        \
      std::printf("%s:%d: %s is false\n", __func__, __LINE__, #condition); \
    }                                                                      \
  } while (0)

class Call final : public kt::sys::Job {
 public:
  Call(std::function<void(kt::sys::Worker&)> f, bool lean) : Job(lean), f_(std::move(f)) {}
  void run(kt::sys::Worker& worker) noexcept override { f_(worker); }

 private:
  std::function<void(kt::sys::Worker&)> f_;
};

inline std::shared_ptr<kt::sys::Job> job(std::function<void(kt::sys::Worker&)> f,
                                         bool lean = false) {
  return std::make_shared<Call>(std::move(f), lean);
}

inline void run(kt::sys::Team& team, std::function<void(kt::sys::Worker&)> f, bool lean = false) {
  const auto j = job(std::move(f), lean);
  team.submit(j);
  j->wait();
}

// The name of this thread.
inline std::string thread_name() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

inline std::size_t at(int i) { return static_cast<std::size_t>(i); }
