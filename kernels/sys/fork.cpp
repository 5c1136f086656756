#include "sys/fork.h"

#include <pthread.h>

#include <atomic>

namespace kt::sys {
namespace {

std::atomic<uint32_t> g_forks{0};

// relaxed: the child of a fork has one thread, and starts any other after this.
void count_fork() { g_forks.fetch_add(1, std::memory_order_relaxed); }

// While the library is loaded, not in a function-local static: a fork during the initialisation
// of one would leave it locked in the child.
[[maybe_unused]] const int g_fork_hook = pthread_atfork(nullptr, nullptr, count_fork);

}  // namespace

uint32_t forks() { return g_forks.load(std::memory_order_relaxed); }

}  // namespace kt::sys
