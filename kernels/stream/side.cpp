#include "side.h"

#include <cstring>
#include <limits>
#include <string>

#include "../sys/need.h"
#include "kt/format.h"

namespace kt {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kMaxTopK = 1 << 16;

void check(const char* name, int64_t value, int64_t most) {
  need(value >= 1 && value <= most, std::string(name) + " " + std::to_string(value) + "; 1 to " +
                                        std::to_string(most) + " is accepted");
}

}  // namespace

StreamSide::StreamSide(int64_t capacity, int64_t hidden, int64_t top_k, DType dtype,
                       bool with_partial)
    : capacity_(capacity), hidden_(hidden), top_k_(top_k), dtype_(dtype) {
  check("capacity", capacity, std::numeric_limits<int32_t>::max());
  check("hidden", hidden, kMaxColumns);
  check("top_k", top_k, kMaxTopK);
  need(int(dtype) >= 0 && int(dtype) <= int(DType::kFP32),
       "unknown dtype " + std::to_string(int(dtype)));
  int64_t end = kAlign;
  const auto place = [&](int64_t bytes) {
    const int64_t begin = end;
    end += round_up(bytes, kAlign);
    return begin;
  };
  times_ = place(kApart - kAlign);
  static_assert(sizeof(StreamTimes) <= kApart - kAlign);
  done_ = place(kApart);
  x_ = place(capacity * hidden * dtype_bytes(dtype));
  ids_ = place(capacity * top_k * int64_t(sizeof(int32_t)));
  weights_ = place(capacity * top_k * int64_t(sizeof(float)));
  out_ = place(capacity * hidden * dtype_bytes(dtype));
  if (with_partial) partial_ = place(capacity * hidden * int64_t(sizeof(float)));
  buffer_ = std::make_shared<HostBuffer>(end);
  const auto routes = size_t(capacity * top_k);
  priv.immediate.resize(routes);
  if (with_partial) priv.deferred.resize(routes);
  priv.weights.resize(routes);
}

void StreamSide::zero_out(int64_t tokens) const {
  std::memset(out(), 0, size_t(tokens * hidden_ * dtype_bytes(dtype_)));
}

void StreamSide::ring(uint32_t number) const noexcept {
  constexpr uint64_t kReady = uint64_t(1) << 32;
  std::atomic_ref(*at<uint64_t>(done_)).store(kReady | number, std::memory_order_release);
}

bool StreamSide::belongs_to(const void* engine) {
  const void* owner = nullptr;
  return engine_.compare_exchange_strong(owner, engine) || owner == engine;
}

}  // namespace kt
