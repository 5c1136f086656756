// Errors on threads that no caller waits for.
#pragma once
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>

namespace kt {

// Thread-safe.
class Errors {
 public:
  // Keeps the joined text, unless an earlier error has not been raised yet. say() must be called
  // later, when the GPU no longer waits.
  void record(std::initializer_list<std::string_view> parts) noexcept;
  // Prints recorded errors to stderr, each once and at most a hundred lines in total. (A replayed
  // graph makes no call that could raise them.)
  void say() noexcept;
  // Throws std::runtime_error with the first error not yet raised. One atomic load if there is
  // none.
  void raise();
  int64_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> waiting_{false};
  std::atomic<int64_t> count_{0};
  std::mutex mutex_;  // guards text_ and unsaid_, and changes of waiting_
  std::string text_, unsaid_;
  int lines_ = 0;  // printed
};

}  // namespace kt
