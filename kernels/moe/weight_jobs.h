// Jobs of a layer's team that write or read its weights.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "state.h"

namespace kt {

// An error in weights that several threads check.
struct Finding {
  PackError error = PackError::kNone;
  int64_t expert = 0;  // index among those that are loaded together
  Matrix matrix = kGate;
  int64_t row = 0;

  // Sort key in the order of an expert's tiles (PoolPart::tile), in which each pool's threads check
  // them. The first bad tile is always among those at which they stopped, whatever the pools and
  // threads.
  std::tuple<int64_t, bool, int64_t, Matrix, int64_t> place() const {
    return {expert, matrix == kDown, row / kTileRows, matrix, row};
  }
};

// Packs the tiles of all experts. Each pool's threads take its tiles one by one, so they touch the
// memory first. If a loaded slot gets new weights, all of them are checked before the first is
// written, so the slot keeps its old weights if one cannot be represented.
class PackJob : public sys::Job {
 public:
  PackJob(std::shared_ptr<LayerState> layer, const std::vector<SlotSource>& experts,
          const sys::Team& team);
  void run(sys::Worker& worker) noexcept override;

  // After the job: the slot and the error in its weights, "" if all were packed.
  std::string problem() const;

 private:
  // A pool's next tiles, expert by expert.
  struct alignas(128) Tasks {
    std::atomic<int64_t> check{0}, pack{0};
  };

  MatrixSource source_of(const SlotSource& expert, const PoolPart& part, Matrix m) const;
  template <class F> void each(std::atomic<int64_t>& next, sys::Worker& worker, F work);

  std::shared_ptr<LayerState> layer_;
  std::vector<SlotSource> experts_;
  bool check_first_ = false;
  std::unique_ptr<Tasks[]> tasks_;  // by pool
  std::vector<Finding> found_;      // by thread: its first
  int64_t floats_ = 0;              // scratch of a thread
  std::unique_ptr<float[]> scratch_;
};

// Outside the layer, a packed matrix is one run of whole tiles, independent of the pools. This is
// the form in packed files.

// Fills a slot. Each pool's threads fill its part, so they touch the memory first. A tile is
// checked and copied while it is in a cache. After an error, part of the slot has the old weights.
class PackedLoad : public sys::Job {
 public:
  PackedLoad(std::shared_ptr<LayerState> layer, int64_t slot, const ByMatrix<const uint8_t*>& tiles,
             const ByMatrix<const float*>& bias, int threads);
  void run(sys::Worker& worker) noexcept override;

  // After the job: the error in the weights, "" if there is none.
  std::string problem() const;

 private:
  std::shared_ptr<LayerState> layer_;
  int64_t slot_;
  ByMatrix<const uint8_t*> tiles_;
  ByMatrix<const float*> bias_;
  std::vector<Finding> findings_;  // by thread: the first in its share
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
