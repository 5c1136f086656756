// Packed weights to and from memory outside the layer, where a matrix is one run of whole tiles,
// whatever the pools: what files of packed weights hold.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "finding.h"
#include "state.h"

namespace kt {

// Fills a slot, each pool's part by its threads, which so touch the memory first. A tile is checked
// and copied while it is in a cache; after an error the slot's weights are partly the old ones.
class PackedLoad : public sys::Job {
 public:
  PackedLoad(std::shared_ptr<LayerState> layer, int64_t slot, const ByMatrix<const uint8_t*>& tiles,
             const ByMatrix<const float*>& bias, int threads);
  void run(sys::Worker& worker) noexcept override;

  // Once done: what is wrong with the weights, "" where nothing is.
  std::string problem() const {
    const Finding* first = first_of(findings_);
    return first ? in_words(*first) : "";
  }

 private:
  std::shared_ptr<LayerState> layer_;
  int64_t slot_;
  ByMatrix<const uint8_t*> tiles_;
  ByMatrix<const float*> bias_;
  std::vector<Finding> findings_;  // per thread: the first in its share
};

// Copies a slot's matrix out, merged from all pools.
class PackedSave : public sys::Job {
 public:
  PackedSave(std::shared_ptr<LayerState> layer, int64_t slot, Matrix m, uint8_t* dst);
  void run(sys::Worker& worker) noexcept override;

 private:
  std::shared_ptr<LayerState> layer_;
  int64_t slot_;
  Matrix matrix_;
  uint8_t* dst_;
};

}  // namespace kt
