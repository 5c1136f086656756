// Which experts deserve the slots of the live expert cache, from what the device has counted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kt {

// Scores an expert by its uses, each of which counts half after half_life tokens. An expert must
// score `margin` more than one that has a slot to replace it.
struct CachePolicy {
  double half_life, margin;
};

// `expert` should get a slot of a layer, and unless one is free, `other` should lose its own.
struct CacheMove {
  int64_t layer, expert, other;
};

// Which experts of L layers with E experts have slots.
struct CacheSlots {
  const uint8_t* resident;    // [L, E], not 0: the expert has a slot, or is about to get one
  const uint8_t* evictable;   // [L, E], not 0: it may lose its slot
  std::vector<int64_t> free;  // [L] slots that wait for an expert
};

// The scores of all experts of L layers. All policies see all uses. For each, the share of uses is
// averaged that the experts with the highest scores had, as many as there are slots. The best
// policy is the one in use.
class CacheScores {
 public:
  // Of a layer in the device's counters, after the uses of each expert.
  enum Number { kTokens, kRoutes, kHits, kVersion, kNumbers };

  // slots: of each layer. Throws std::invalid_argument for values that make no sense.
  CacheScores(std::vector<CachePolicy> policies, std::vector<int64_t> slots, int64_t experts);

  // Takes new batches into account. counters: [L, E + kNumbers]. Returns whether there were any.
  bool see(const int64_t* counters);

  // At most `most` moves, the most valuable first, and at most `per_layer` of a layer. A layer's
  // first move is before the second ones of all layers. Free slots come first in their layer; the
  // `other` of their moves keeps its slot. Of equal experts, the first one is wanted, and the last
  // one is given up.
  std::vector<CacheMove> wanted(const CacheSlots& slots, size_t per_layer, size_t most) const;

  size_t layers() const { return slots_.size(); }
  size_t experts() const { return experts_; }
  size_t policies() const { return policies_.size(); }
  // The number of the policy in use.
  size_t policy() const { return used_; }
  // [L, E], by one of the policies.
  const std::vector<double>& values(size_t policy) const { return values_.at(policy); }

 private:
  const std::vector<CachePolicy> policies_;
  const std::vector<int64_t> slots_;
  const size_t experts_;
  std::vector<std::vector<double>> values_;  // of each policy
  std::vector<int64_t> uses_, new_;          // [L, E] at the last look, and since the one before
  std::vector<double> shares_;               // averages of each policy
  std::vector<double> sorted_;
  int64_t tokens_ = 0, looks_ = 0;
  size_t used_ = 0;

  void compare();
  double share(const std::vector<double>& values);
};

}  // namespace kt
