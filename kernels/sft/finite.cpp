#include "finite.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

namespace kt {
namespace {

constexpr int64_t kBlock = 16384;  // values between checks whether another thread found one

template <class T> bool finite(const T* values, int64_t n, T exponent) {
  bool good = true;
  for (int64_t i = 0; i < n; ++i) good &= (values[i] & exponent) != exponent;
  return good;
}

class FiniteJob : public sys::Job {
 public:
  explicit FiniteJob(std::vector<FloatArray> arrays) : arrays_(std::move(arrays)) {}
  bool good() const { return good_.load(std::memory_order_relaxed); }

  void run(sys::Worker& worker) noexcept override {
    for (const FloatArray& values : arrays_) {
      const int64_t end = values.n * (worker.rank + 1) / worker.team_threads;
      for (int64_t i = values.n * worker.rank / worker.team_threads; i < end && good(); i += kBlock)
        if (!block(values, i, std::min(kBlock, end - i)))
          good_.store(false, std::memory_order_relaxed);
    }
  }

 private:
  static bool block(const FloatArray& values, int64_t first, int64_t n) {
    if (values.bf16)
      return finite(static_cast<const uint16_t*>(values.data) + first, n, uint16_t{0x7f80});
    return finite(static_cast<const uint32_t*>(values.data) + first, n, uint32_t{0x7f800000});
  }

  const std::vector<FloatArray> arrays_;
  std::atomic<bool> good_{true};
};

}  // namespace

bool all_finite(sys::Team& team, std::vector<FloatArray> arrays) {
  const auto job = std::make_shared<FiniteJob>(std::move(arrays));
  team.submit(job);
  job->wait();
  return job->good();
}

}  // namespace kt
