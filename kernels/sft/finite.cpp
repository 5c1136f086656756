#include "finite.h"

#include <algorithm>
#include <atomic>
#include <memory>

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
  explicit FiniteJob(const FloatArray& values) : values_(values) {}
  bool good() const { return good_.load(std::memory_order_relaxed); }

  void run(sys::Worker& worker) noexcept override {
    const int64_t end = values_.n * (worker.rank + 1) / worker.team_threads;
    for (int64_t i = values_.n * worker.rank / worker.team_threads; i < end && good(); i += kBlock)
      if (!block(i, std::min(kBlock, end - i))) good_.store(false, std::memory_order_relaxed);
  }

 private:
  bool block(int64_t first, int64_t n) const {
    if (values_.bf16)
      return finite(static_cast<const uint16_t*>(values_.data) + first, n, uint16_t{0x7f80});
    return finite(static_cast<const uint32_t*>(values_.data) + first, n, uint32_t{0x7f800000});
  }

  const FloatArray values_;
  std::atomic<bool> good_{true};
};

}  // namespace

bool all_finite(sys::Team& team, const FloatArray& values) {
  const auto job = std::make_shared<FiniteJob>(values);
  team.submit(job);
  job->wait();
  return job->good();
}

}  // namespace kt
