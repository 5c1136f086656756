// The driver for few pairs of token and expert: reading the weights is what takes the time.
#pragma once
#include "phases.h"

namespace kt {

// Each expert's weights are read once, in an even stream by all threads: the tasks of the down
// product are (expert, tile), and the results of each pair are kept and summed afterwards.
class Decode : public Phases {
 public:
  using Phases::Phases;
  void run();

 private:
  int64_t tiles_at_once(int64_t tile_bytes) const;
  void down();
  ActRows h_rows(const ExpertRows& e);
  float* results_of(int pool, const ExpertRows& e, int64_t tile) const;
  void sum_pairs(int pool, int64_t group, int64_t tile) const;
  void finish();

  const ExpertRows* own_h_ = nullptr;  // whose whole rows this thread has converted last
};

}  // namespace kt
