// What went wrong on threads that no caller waits for.
#pragma once
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>

namespace kt {

// From any thread.
class Errors {
 public:
  // Keeps the text, parts joined, and says it on stderr, unless an earlier one still waits to be
  // raised.
  void record(std::initializer_list<std::string_view> parts) noexcept;
  // Throws std::runtime_error with the first that was not raised yet. One atomic load without.
  void raise();
  int64_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> waiting_{false};
  std::atomic<int64_t> count_{0};
  std::mutex mutex_;  // guards text_, and changes of waiting_
  std::string text_;
};

}  // namespace kt
