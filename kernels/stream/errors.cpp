#include "errors.h"

#include <cstdio>
#include <new>
#include <stdexcept>
#include <utility>

namespace kt {

constexpr const char* kOutOfMemory = "out of memory";
constexpr int kLines = 100;

void Errors::record(std::initializer_list<std::string_view> parts) noexcept {
  std::lock_guard lock(mutex_);
  count_.fetch_add(1, std::memory_order_relaxed);
  std::string text;
  try {
    for (std::string_view part : parts) text += part;
    if (++lines_ <= kLines)
      unsaid_ += "kt: " + text + (lines_ < kLines ? "\n" : "; no more of these lines\n");
  } catch (const std::bad_alloc&) {
    text.clear();
  }
  if (waiting_.load(std::memory_order_relaxed)) return;
  text_ = std::move(text);
  waiting_.store(true, std::memory_order_release);
}

void Errors::say() noexcept {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    text.swap(unsaid_);
  }
  if (!text.empty()) std::fputs(text.c_str(), stderr);  // may block if stderr is not read
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
