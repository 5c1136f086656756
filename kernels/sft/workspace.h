// Buffers of training passes beside those of the inference layer, shared by the layers of one team,
// whose jobs run one at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../moe/state.h"
#include "../sys/numa_memory.h"
#include "kt/training.h"

namespace kt {

// What one layer asks of the buffers.
struct TrainingSize {
  int64_t max_tokens, top_k, pairs;  // of a chunk
  int64_t experts, hidden, intermediate, rank;

  int64_t rank_padded() const { return round_up(rank, kTileRows); }
  // Rows for the pairs, where every expert begins a block; and where it begins two blocks.
  int64_t rows() const { return rows_in(kBlockRows); }
  int64_t turned_rows() const { return rows_in(kTileRows); }
  bool holds(const TrainingSize& other) const;
  void grow_to(const TrainingSize& other);

 private:
  int64_t rows_in(int64_t unit) const { return pairs + unit * (experts + 2) + kRowSlack; }
};

// What one thread keeps for itself.
struct TrainingSpace {
  float* tile[8];       // tiles of values
  float* sums;          // of outer products: 6 of [rank][32]
  float* columns[2];    // 32 columns of all rows of an expert
  float* row;           // of H or I
  int32_t* pairs;       // of a token
  WeightedRow* parts;   // of a sum over a token's pairs and the pools
  uint8_t* transposed;  // transposed_scratch() of all terms of a sum
  sys::Mapping memory;
};

struct TrainingWorkspace {
  TrainingWorkspace(const TrainingSize& size, int pools, int threads);

  TrainingSize size;
  std::vector<float> ones;    // [pairs]
  std::vector<int32_t> pair;  // [pairs]: of each route of a chunk, where one is computed
  // Rows by expert (TrainingPass::row): of H columns the adapters' x of gate and up, and the
  // gradient of the output; of the rank's columns one for each matrix.
  sys::Mapping x[2], grad_out, rank_rows[kMatrices];
  // What TurnedKernels::rows makes of grad_out and rank_rows, by TrainingPass::turned_row.
  sys::Mapping turned_out, turned_ranks[kMatrices];
  sys::Mapping rank_values[kMatrices];  // float32 [rows][rank_padded]
  struct Pool {
    sys::Mapping grad[2], h;       // rows of I: gradients of gate and up, the adapter's h
    sys::Mapping turned[2];        // of `grad`
    sys::Mapping rank[kMatrices];  // float32 [rows][rank_padded]: this pool's part of sums over I
    sys::Mapping dots;             // float32 [tiles of I][pairs]
    sys::Mapping gate_up;          // of a chunk, where they are computed again: by saved_tile()
    sys::Mapping full[kMatrices];  // float32 tiles: gradients of gate and up, h; by saved_tile()
    // float32 [pairs][H]: the product with down, then the gradient of x; or the gradients of gate
    // and up, with columns in their order.
    sys::Mapping by_pair[2];
  };
  std::vector<Pool> pool;
  std::vector<TrainingSpace> thread;  // by rank
};

// Buffers for the team of a layer that hold at least `size`: the present ones where they do.
std::shared_ptr<TrainingWorkspace> training_workspace_for(const LayerState& layer,
                                                          const TrainingSize& size);

}  // namespace kt
