// The driver for many pairs of token and expert: multiplying is what takes the time.
#pragma once
#include "phases.h"

namespace kt {

// The largest work items come first. The tasks of the down product are (group of experts, tile) and
// sum in their own tile of the group's sums; whoever completes the last group of a tile finishes
// it.
class Prefill : public Phases {
 public:
  using Phases::Phases;
  void run();

 private:
  void quantise_h();
  void down();
  void down_of_group(int64_t group, int64_t first, int64_t last);
  void sum_done(int64_t tile, int sums);
};

}  // namespace kt
