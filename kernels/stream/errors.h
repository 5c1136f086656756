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
  // Keeps the text, parts joined, unless an earlier one still waits to be raised. say() is still to
  // be called, when nobody waits any more.
  void record(std::initializer_list<std::string_view> parts) noexcept;
  // On stderr, what was recorded and not said yet; a hundred lines at most in all. A replayed graph
  // makes no call that could raise it.
  void say() noexcept;
  // Throws std::runtime_error with the first that was not raised yet. One atomic load without.
  void raise();
  int64_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> waiting_{false};
  std::atomic<int64_t> count_{0};
  std::mutex mutex_;  // guards text_ and unsaid_, and changes of waiting_
  std::string text_, unsaid_;
  int lines_ = 0;  // said
};

}  // namespace kt
