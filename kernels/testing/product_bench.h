// A single kernel over a working set of packed tiles. benchmarks/run.py times it.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../sys/numa_memory.h"
#include "../sys/team.h"
#include "product.h"

namespace kt {

class ProductBench {
 public:
  // Packs the matrix and fills at least `bytes` with copies of its tiles; each thread has its part.
  // Throws std::invalid_argument if the format cannot hold the weights.
  ProductBench(std::shared_ptr<sys::Team> team, const KernelTable* table, bool gemm,
               const MatrixLayout& layout, const WeightSource& weights, int64_t bytes);

  // Sets the rows of later runs: X [m, K], row-major float32.
  void set_rows(const float* x, int64_t m);

  // The seconds in which every thread multiplies the rows with `tiles` tiles of its part. Continues
  // where the last run ended, and wraps around.
  double run(int64_t tiles);

  int64_t columns() const { return layout_.cols; }
  int64_t tile_bytes() const { return layout_.tile_bytes(); }
  int64_t bytes() const { return int64_t(memory_.size()); }

 private:
  class Fill;
  class Run;

  std::shared_ptr<sys::Team> team_;
  const KernelTable* table_;
  MatrixLayout layout_;
  const ProductKernel& kernel_;
  int64_t part_tiles_;             // tiles of each thread
  sys::Mapping memory_;            // [thread][part_tiles_]
  std::vector<int64_t> next_;      // by thread: where its next run begins
  std::vector<sys::Mapping> out_;  // by thread
  OperandRows rows_;
  int64_t m_ = 0;
};

}  // namespace kt
