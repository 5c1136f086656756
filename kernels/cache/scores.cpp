#include "scores.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "../sys/need.h"

namespace kt {
namespace {

constexpr int64_t kLooks = 4;     // of which one compares the policies
constexpr double kAveraged = 32;  // comparisons
constexpr double kBetter = 0.02;  // share by which another policy must be better to be used
constexpr double kTie = 1e-6;     // small beside a use, and large beside rounding
constexpr double kLeast =
    1e-200;  // smaller scores are 0: denormal numbers are slow to compute with

constexpr int64_t kMaxSize = 1 << 24;  // of L * E, beyond any model

std::vector<CachePolicy> checked(std::vector<CachePolicy> policies) {
  need(!policies.empty(), "no policy; at least one is needed");
  for (const CachePolicy& policy : policies) {
    need(std::isfinite(policy.half_life) && policy.half_life > 0,
         "a half-life of " + std::to_string(policy.half_life) + " tokens; accepted: above 0");
    need(std::isfinite(policy.margin),
         "a margin of " + std::to_string(policy.margin) + "; accepted: a finite number");
  }
  return policies;
}

std::vector<int64_t> checked(std::vector<int64_t> slots, int64_t experts) {
  need(!slots.empty(), "no layer; at least one is needed");
  need(experts >= 1 && experts <= kMaxSize / int64_t(slots.size()),
       std::to_string(experts) + " experts in " + std::to_string(slots.size()) +
           " layers; accepted: 1 to " + std::to_string(kMaxSize) + " in all");
  for (int64_t of_layer : slots)
    need(of_layer >= 1 && of_layer <= experts,
         std::to_string(of_layer) + " slots; accepted: 1 to " + std::to_string(experts));
  return slots;
}

struct Candidate {
  size_t expert;
  double value;
};

// Inserts a candidate into a list in descending order of values, of at most `most`. Of equal ones,
// the one that came first is first.
void insert(std::vector<Candidate>& best, Candidate one, size_t most) {
  if (best.size() == most && one.value <= best.back().value) return;
  if (best.size() == most) best.pop_back();
  auto place = best.end();
  while (place != best.begin() && (place - 1)->value < one.value) --place;
  best.insert(place, one);
}

}  // namespace

CacheScores::CacheScores(std::vector<CachePolicy> policies, std::vector<int64_t> slots,
                         int64_t experts)
    : policies_(checked(std::move(policies))),
      slots_(checked(std::move(slots), experts)),
      experts_(size_t(experts)),
      uses_(layers() * experts_),
      new_(uses_.size()),
      shares_(policies_.size()),
      sorted_(experts_) {
  std::vector<double> unused(uses_.size());  // the lower its number, the longer an expert is kept
  for (size_t i = 0; i < unused.size(); ++i) unused[i] = -kTie * double(i % experts_);
  values_.assign(policies_.size(), unused);
}

bool CacheScores::see(const int64_t* counters) {
  const size_t row = experts_ + kNumbers;
  int64_t tokens = std::numeric_limits<int64_t>::min();
  for (size_t layer = 0; layer < layers(); ++layer)
    tokens = std::max(tokens, counters[layer * row + experts_ + kTokens]);
  if (tokens == tokens_) return false;
  for (size_t layer = 0; layer < layers(); ++layer) {
    const int64_t* uses = counters + layer * row;
    int64_t* before = &uses_[layer * experts_];
    int64_t* since = &new_[layer * experts_];
    for (size_t e = 0; e < experts_; ++e) {
      since[e] = int64_t(uint64_t(uses[e]) - uint64_t(before[e]));
      before[e] = uses[e];
    }
  }
  if (policies() > 1 && looks_++ % kLooks == 0) compare();
  const double passed = std::max(0.0, double(tokens) - double(tokens_));
  tokens_ = tokens;
  for (size_t number = 0; number < policies(); ++number) {
    const double factor = std::exp2(-passed / policies_[number].half_life);
    double* values = values_[number].data();
    for (size_t i = 0; i < new_.size(); ++i) {
      const double faded = values[i] * factor;
      values[i] = (std::abs(faded) < kLeast ? 0.0 : faded) + double(new_[i]);
    }
  }
  return true;
}

// The share of the new uses that the experts with the highest scores had.
double CacheScores::share(const std::vector<double>& values) {
  double hits = 0, total = 0;
  for (size_t layer = 0; layer < layers(); ++layer) {
    const double* of_layer = &values[layer * experts_];
    const int64_t* since = &new_[layer * experts_];
    sorted_.assign(of_layer, of_layer + experts_);
    const auto lowest = sorted_.begin() + (slots_[layer] - 1);
    std::nth_element(sorted_.begin(), lowest, sorted_.end(), std::greater<>());
    for (size_t e = 0; e < experts_; ++e) {
      total += double(since[e]);
      if (of_layer[e] >= *lowest) hits += double(since[e]);
    }
  }
  return total > 0 ? hits / total : -1;
}

void CacheScores::compare() {
  for (size_t number = 0; number < policies(); ++number) {
    const double found = share(values_[number]);
    if (found < 0) return;  // no uses
    shares_[number] += (found - shares_[number]) / kAveraged;
  }
  const size_t best = size_t(std::max_element(shares_.begin(), shares_.end()) - shares_.begin());
  if (shares_[best] > shares_[used_] + kBetter) used_ = best;
}

std::vector<CacheMove> CacheScores::wanted(const CacheSlots& slots, size_t per_layer,
                                           size_t most) const {
  const double margin = policies_[used_].margin;
  struct Ranked {
    size_t rank;
    bool replaces;
    double worth;
    CacheMove move;
  };
  std::vector<Ranked> found;
  std::vector<Candidate> best, worst;  // with a slot, by the negative score
  for (size_t layer = 0; layer < layers(); ++layer) {
    const size_t begin = layer * experts_;
    const double* values = &values_[used_][begin];
    best.clear();
    worst.clear();
    for (size_t e = 0; e < experts_; ++e)
      if (!slots.resident[begin + e]) insert(best, {e, values[e]}, per_layer);
    for (size_t e = experts_; e-- > 0;)
      if (slots.evictable[begin + e]) insert(worst, {e, -values[e]}, per_layer);
    const size_t free = size_t(std::max<int64_t>(0, slots.free[layer]));
    for (size_t rank = 0; rank < best.size(); ++rank) {
      const bool replaces = rank >= free;
      const size_t place = replaces ? rank - free : 0;
      if (place >= worst.size() && replaces) break;
      // With a free slot, the expert that the upload is compared with later.
      const Candidate other = worst.empty() ? Candidate{0, 0} : worst[place];
      const double gain = best[rank].value + other.value;
      if (replaces && !(gain >= margin)) break;  // and the next ones gain still less
      found.push_back({rank,
                       replaces,
                       replaces ? gain : best[rank].value,
                       {int64_t(layer), int64_t(best[rank].expert), int64_t(other.expert)}});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Ranked& a, const Ranked& b) {
    return std::tuple(a.rank, a.replaces, -a.worth) < std::tuple(b.rank, b.replaces, -b.worth);
  });
  std::vector<CacheMove> moves;
  for (size_t i = 0; i < std::min(most, found.size()); ++i) moves.push_back(found[i].move);
  return moves;
}

}  // namespace kt
