#include "split.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace kt {
namespace {

int32_t ordered(float weight) {
  if (std::isnan(weight)) return std::numeric_limits<int32_t>::max();
  const auto bits = std::bit_cast<int32_t>(weight);
  return bits >= 0 ? bits : std::numeric_limits<int32_t>::min() - bits;  // -0 is 0
}

}  // namespace

DeferredSplit::DeferredSplit(int64_t num_experts, int64_t top_k)
    : top_k_(top_k), protected_(size_t(num_experts)), order_(size_t(top_k)) {}

void DeferredSplit::run(const float* weights, int64_t tokens, int64_t protected_k, int64_t* ids,
                        int64_t* deferred) {
  for (int64_t t = 0; t < tokens; ++t) protect(ids + t * top_k_, weights + t * top_k_, protected_k);
  const int64_t routes = tokens * top_k_;
  for (int64_t i = 0; i < routes; ++i) {
    const bool expert = is_expert(ids[i]), now = expert && protected_[size_t(ids[i])];
    deferred[i] = expert && !now ? ids[i] : -1;
    if (!now) ids[i] = -1;
  }
  for (int64_t i = 0; i < routes; ++i)
    if (ids[i] >= 0) protected_[size_t(ids[i])] = 0;
}

// Compares each of k routes with all others: k is small, and a sort would branch.
void DeferredSplit::protect(const int64_t* ids, const float* weights, int64_t protected_k) {
  std::transform(weights, weights + top_k_, order_.begin(), ordered);
  const int32_t* order = order_.data();
  for (int64_t j = 0; j < top_k_; ++j) {
    int64_t before = 0;
    for (int64_t i = 0; i < j; ++i) before += order[i] >= order[j];
    for (int64_t i = j + 1; i < top_k_; ++i) before += order[i] > order[j];
    if (before < protected_k && is_expert(ids[j])) protected_[size_t(ids[j])] = 1;
  }
}

}  // namespace kt
