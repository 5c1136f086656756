#include "side.h"

#include <cstring>
#include <limits>
#include <string>

#include "../moe/form.h"
#include "kt/format.h"

namespace kt {
namespace {

constexpr int64_t kAlign = 64;

}  // namespace

StreamSide::StreamSide(int64_t capacity, int64_t hidden, int64_t top_k, DType dtype,
                       bool with_partial)
    : capacity_(capacity), hidden_(hidden), top_k_(top_k), dtype_(dtype) {
  need_in_range("capacity", capacity, 1, std::numeric_limits<int32_t>::max());
  need_in_range("hidden", hidden, 1, kMaxColumns);
  need_in_range("top_k", top_k, 1, kMaxTopK);
  need_dtype("dtype", dtype);
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
  priv.immediate = std::make_unique_for_overwrite<int64_t[]>(routes);
  if (with_partial) priv.deferred = std::make_unique_for_overwrite<int64_t[]>(routes);
  priv.weights = std::make_unique_for_overwrite<float[]>(routes);
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
