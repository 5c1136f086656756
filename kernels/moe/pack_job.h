// The packing of one expert as a job of its layer's team.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../pack/pack.h"
#include "layer.h"

namespace kt {

// Checks all weights, then packs them: nothing is written when a weight cannot be represented. The
// tiles of each pool are shared among its threads, which so touch the memory first.
class PackJob : public sys::Job {
 public:
  PackJob(std::shared_ptr<LayerState> layer, int64_t slot, const ExpertSource& source, int threads);
  void run(sys::Worker& worker) noexcept override;

  // Once done: what is wrong with the weights, "" when they were packed.
  std::string problem() const;

 private:
  // A tile's matrix: its layout, source, number there, and place in the packed expert.
  struct Tile {
    Matrix matrix;
    const MatrixLayout& layout;
    MatrixSource source;
    int64_t number;
    uint8_t* dst;
  };
  struct Finding {
    PackError error = PackError::kNone;
    Matrix matrix = kGate;
    int64_t row = 0;
  };

  Tile tile(const PoolPart& part, int pool, int64_t i) const;
  void keep_biases();

  std::shared_ptr<LayerState> layer_;
  int64_t slot_;
  ExpertSource source_;
  std::vector<Finding> findings_;            // per thread: the first in its share
  std::vector<std::vector<float>> scratch_;  // per thread
};

}  // namespace kt
