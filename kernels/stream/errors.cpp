#include "errors.h"

#include <cstdio>
#include <new>
#include <stdexcept>
#include <utility>

namespace kt {

constexpr const char* kOutOfMemory = "out of memory";

void Errors::record(std::initializer_list<std::string_view> parts) noexcept {
  std::lock_guard lock(mutex_);
  count_.fetch_add(1, std::memory_order_relaxed);
  if (waiting_.load(std::memory_order_relaxed)) return;
  text_.clear();
  try {
    for (std::string_view part : parts) text_ += part;
  } catch (const std::bad_alloc&) {
    text_.clear();
  }
  waiting_.store(true, std::memory_order_release);
  // A replayed graph makes no call that could raise it.
  std::fprintf(stderr, "kt: %s\n", text_.empty() ? kOutOfMemory : text_.c_str());
}

void Errors::raise() {
  if (!waiting_.load(std::memory_order_acquire)) return;
  std::string text;
  {
    std::lock_guard lock(mutex_);
    if (!waiting_.load(std::memory_order_relaxed)) return;
    text = std::move(text_);
    waiting_.store(false, std::memory_order_relaxed);
  }
  throw std::runtime_error(text.empty() ? kOutOfMemory : text);
}

}  // namespace kt
