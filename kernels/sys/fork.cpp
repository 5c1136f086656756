#include "sys/fork.h"

#include <pthread.h>

#include <atomic>

namespace kt::sys {
namespace {

std::atomic<uint32_t> g_forks{0};

// relaxed: a forked child has one thread, and starts all others after this.
void count_fork() { g_forks.fetch_add(1, std::memory_order_relaxed); }

// Registered when the library is loaded, not in a function-local static: a fork during its
// initialisation would leave it locked in the child.
[[maybe_unused]] const int g_fork_hook = pthread_atfork(nullptr, nullptr, count_fork);

}  // namespace

uint32_t forks() { return g_forks.load(std::memory_order_relaxed); }

}  // namespace kt::sys
