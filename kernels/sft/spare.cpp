#include "spare.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

namespace kt {
namespace {

std::weak_ptr<SpareMemory> g_spare;
std::mutex g_mutex;  // guards g_spare and its memory

// If another thread holds the mutex at a fork, it must not stay locked in the child.
[[maybe_unused]] const int g_fork_hook =
    pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); }, [] { g_mutex.unlock(); });

}  // namespace

PassMemory::PassMemory(const Sizes& sizes) : x(sizes.x), ranks(sizes.ranks) {
  for (const Part& part : sizes.gate_up) {
    gate_up.emplace_back(part.bytes, part.node);
    nodes_.push_back(part.node);
  }
}

bool PassMemory::holds(const Sizes& sizes) const {
  const auto part_holds = [](const sys::Mapping& memory, int node, const Part& part) {
    return memory.size() >= part.bytes && node == part.node;
  };
  if (x.size() < sizes.x || ranks.size() < sizes.ranks) return false;
  if (gate_up.size() != sizes.gate_up.size()) return false;
  for (size_t p = 0; p < gate_up.size(); ++p)
    if (!part_holds(gate_up[p], nodes_[p], sizes.gate_up[p])) return false;
  return true;
}

int64_t PassMemory::bytes() const {
  size_t total = x.size() + ranks.size();
  for (const sys::Mapping& part : gate_up) total += part.size();
  return int64_t(total);
}

std::shared_ptr<SpareMemory> SpareMemory::of_process() {
  const std::lock_guard lock(g_mutex);
  auto spare = g_spare.lock();
  if (!spare) g_spare = spare = std::make_shared<SpareMemory>();
  return spare;
}

PassMemory SpareMemory::take(const PassMemory::Sizes& sizes) {
  if (!sizes.x) return PassMemory(sizes);  // a pass of no tokens
  std::vector<PassMemory> too_small;       // freed after unlocking
  {
    const std::lock_guard lock(g_mutex);
    auto best = memory_.end();
    for (auto one = memory_.begin(); one != memory_.end(); ++one)
      if (one->holds(sizes) && (best == memory_.end() || one->bytes() < best->bytes())) best = one;
    if (best != memory_.end()) {
      PassMemory found = std::move(*best);
      memory_.erase(best);
      return found;
    }
    if (!memory_.empty()) {
      too_small.push_back(std::move(memory_.back()));
      memory_.pop_back();
    }
  }
  too_small.clear();
  return PassMemory(sizes);
}

void SpareMemory::give_back(PassMemory&& memory) noexcept {
  if (!memory.x.size()) return;
  const std::lock_guard lock(g_mutex);
  try {
    memory_.push_back(std::move(memory));
  } catch (const std::bad_alloc&) {  // the memory is then freed
  }
}

int64_t SpareMemory::clear() {
  std::vector<PassMemory> unused;
  {
    const std::lock_guard lock(g_mutex);
    unused.swap(memory_);
  }
  int64_t bytes = 0;
  for (const PassMemory& one : unused) bytes += one.bytes();
  return bytes;
}

}  // namespace kt
