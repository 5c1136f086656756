// Buffers of a forward pass, shared by the layers of one team, whose jobs run one at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../sys/fork.h"
#include "../sys/numa_memory.h"
#include "../sys/task_queue.h"
#include "../sys/team.h"
#include "act_rows.h"
#include "plan.h"

namespace kt {

// The sizes that one layer needs. All are positive.
struct WorkspaceSize {
  int64_t max_tokens, top_k;
  int64_t experts;       // E
  int64_t hidden;        // H
  int64_t intermediate;  // I, of all pools
};

// The capacity of a workspace: the maximum of each field over the layers that share it.
struct WorkspaceCapacity {
  int64_t tokens, hidden, intermediate, experts;
  int64_t pairs;      // of token and expert
  int64_t pair_rows;  // rows for the pairs, including the rest of whole blocks
  int64_t sums;       // floats of the sums over experts, per pool
  // Throws std::bad_alloc if a count does not fit into 64 bits.
  explicit WorkspaceCapacity(const WorkspaceSize& size);
  bool holds(const WorkspaceCapacity& other) const;
  void grow_to(const WorkspaceCapacity& other);
};

// Maximum number of rows per kernel call, which bounds the scratch of a thread.
constexpr int64_t kRowBlock = 256;

// Up to this many tokens, every thread makes the plan and the A rows itself, which is cheaper than
// a barrier.
constexpr int64_t kOwnTokens = 4;

// The private memory of a thread during a forward pass.
struct ThreadSpace {
  Plan plan;                    // of at most kFewIds pairs
  std::vector<int64_t> starts;  // [threads + 1], of the tasks of a phase
  RowPointers x[2];             // of kOwnTokens: for gate, and for up if it needs another kind
  RowPointers h;                // of kFewPairs (int8)
  uint8_t* row;                 // a single A row
  uint8_t* ordered;             // a row of x with its columns in an expert's order
  float* scratch;               // 2 * (kRowBlock + kRowSlack) * 32 floats
  sys::Mapping memory;          // of all of the above
};

struct Workspace {
  // Throws std::bad_alloc if there is not enough memory.
  Workspace(const WorkspaceCapacity& capacity, int pools, int threads);

  // Must be called before a pass is queued. In a forked child, the first call resets the state of a
  // pass that the parent had not finished.
  void renew_after_fork();

  WorkspaceCapacity capacity;
  int threads;
  Plan plan;
  std::vector<ThreadSpace> thread;   // by number in the team, so each stays on its NUMA node
  std::vector<sys::TaskSlot> slots;  // by rank in the pass
  std::unique_ptr<std::atomic<int>[]> sums_done;  // per tile of H: completed sums; 0 between chunks
  uint16_t phase = 0;        // the slots' last phase; rank 0 writes it at the end of a pass
  ActBuffer x[2];            // of the tokens: for gate, and for up if it needs another kind
  ActBuffer gathered[2];     // of the pairs, likewise
  sys::Mapping h_float;      // [pairs][I] before quantisation
  std::vector<ActBuffer> h;  // per pool: of the pairs
  std::vector<sys::Mapping> results;  // per pool, few pairs: [expert][tiles(H)][its pairs][32]
  std::vector<sys::Mapping> sum;      // per pool: [tiles(H)][groups][tokens][32]
  sys::PerProcess process{true};      // guards slots, sums_done and phase, which passes share
  std::weak_ptr<void> training;       // TrainingWorkspace; under workspace_lock()
};

// Held while workspaces are looked up and created, and during forks.
std::unique_lock<std::mutex> workspace_lock();

// A workspace for the team that holds at least `size`: the team's present one if it is large
// enough.
std::shared_ptr<Workspace> workspace_for(const sys::Team& team, const WorkspaceSize& size);

}  // namespace kt
