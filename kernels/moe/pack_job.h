// The packing of one expert as a job of its layer's team.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "finding.h"
#include "layer.h"

namespace kt {

// Checks all weights, then packs them: nothing is written when a weight cannot be represented. The
// tiles of each pool are shared among its threads, which so touch the memory first.
class PackJob : public sys::Job {
 public:
  PackJob(std::shared_ptr<LayerState> layer, int64_t slot, const ExpertSource& source, int threads);
  void run(sys::Worker& worker) noexcept override;

  // Once done: what is wrong with the weights, "" when they were packed.
  std::string problem() const { return first_problem(findings_); }

 private:
  MatrixSource source_of(const PoolPart& part, Matrix m) const;

  std::shared_ptr<LayerState> layer_;
  int64_t slot_;
  ExpertSource source_;
  std::vector<Finding> findings_;            // per thread: the first in its share
  std::vector<std::vector<float>> scratch_;  // per thread
};

}  // namespace kt
