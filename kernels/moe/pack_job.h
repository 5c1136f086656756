// The packing of experts as a job of their layer's team.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "finding.h"
#include "state.h"

namespace kt {

// Packs the tiles of all experts in one go. Those of each pool are taken by its threads one by one,
// which so touch the memory first. A slot loaded before keeps its weights when one of the new ones
// cannot be represented: then all are checked before the first is written.
class PackJob : public sys::Job {
 public:
  PackJob(std::shared_ptr<LayerState> layer, const std::vector<SlotSource>& experts,
          const sys::Team& team);
  void run(sys::Worker& worker) noexcept override;

  // Once done: the slot and what is wrong with its weights, "" when all were packed.
  std::string problem() const;

 private:
  // The tiles of a pool, of one expert after the other, that are not taken yet.
  struct alignas(128) Tasks {
    std::atomic<int64_t> check{0}, pack{0};
  };

  MatrixSource source_of(const SlotSource& expert, const PoolPart& part, Matrix m) const;
  template <class F> void each(std::atomic<int64_t>& next, sys::Worker& worker, F work);

  std::shared_ptr<LayerState> layer_;
  std::vector<SlotSource> experts_;
  bool check_first_ = false;
  std::unique_ptr<Tasks[]> tasks_;  // per pool
  std::vector<Finding> found_;      // per thread: the first
  int64_t floats_ = 0;              // of scratch for a thread
  std::unique_ptr<float[]> scratch_;
};

}  // namespace kt
