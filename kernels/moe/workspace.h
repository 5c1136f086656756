// Buffers of a forward pass, shared by the layers of one team, whose jobs run one at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../sys/numa_memory.h"
#include "../sys/team.h"
#include "kt/kernel_table.h"

namespace kt {

// What one layer asks of a workspace. All are positive.
struct WorkspaceSize {
  int64_t max_tokens, top_k;
  int64_t experts;       // E
  int64_t hidden;        // H
  int64_t intermediate;  // I, of all pools
};

// What a workspace holds; the largest of each field over the layers that share it.
struct WorkspaceCapacity {
  int64_t tokens, hidden, intermediate;
  int64_t pair_rows;  // rows for the token-expert pairs, with what whole blocks of them add
  // Throws std::bad_alloc where a count does not fit into 64 bits.
  explicit WorkspaceCapacity(const WorkspaceSize& size);
  bool holds(const WorkspaceCapacity& other) const;
  void grow_to(const WorkspaceCapacity& other);
};

// Rows that a tile kernel may touch past the last one.
constexpr int64_t kRowSlack = 32;

// Where byte 0 of row `row` lies in a buffer of blocked A rows, and the copy of a row into one.
inline uint8_t* blocked_row(uint8_t* rows, int64_t stride, int64_t row) {
  return rows + row / kBlockRows * kBlockRows * stride + row % kBlockRows * kChunkBytes;
}
void copy_to_blocks(const uint8_t* src, int64_t stride, uint8_t* rows, int64_t row);

// Rows per kernel call: bounds the scratch of a thread.
constexpr int64_t kRowBlock = 128;

struct Workspace {
  // Throws std::bad_alloc for sizes that no memory holds.
  Workspace(const WorkspaceCapacity& capacity, int pools, int threads);

  WorkspaceCapacity capacity;
  int threads;
  sys::Mapping x;        // A rows of the tokens
  sys::Mapping x_scale;  // and their scales and sums, per row or per row and group
  sys::Mapping x_sum;
  sys::Mapping gathered, gathered_scale, gathered_sum;  // A rows of the pairs, for tile kernels
  sys::Mapping h_float;                                 // [pairs][I] before quantisation
  std::vector<sys::Mapping> h, h_scale, h_sum;          // per pool: A rows of the pairs
  std::vector<sys::Mapping> sum;                        // per pool: [tiles(H)][tokens][32]
  sys::Mapping scratch;                                 // per thread: gate and up blocks
  sys::Mapping rows;                                    // per thread: one A row of h
  float* thread_scratch(int rank) const;                // 2 * (kRowBlock + kRowSlack) * 32 floats
  uint8_t* thread_row(int rank) const;
};

// A workspace for the team that holds at least `size`: the team's present one where it does.
std::shared_ptr<Workspace> workspace_for(const std::shared_ptr<sys::Team>& team,
                                         const WorkspaceSize& size);

}  // namespace kt
