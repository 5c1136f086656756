// The memory that forward passes keep until their backward passes. The layers of a process share
// it: when a pass no longer needs its memory, the next pass of any layer takes it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../sys/numa_memory.h"

namespace kt {

// 2 H + 4 k I + 8 k R bytes per token; 2 H + 4 k I without gradients of the adapters; 2 H where all
// but x is computed again.
struct PassMemory {
  struct Part {
    size_t bytes;
    int node;  // NUMA node
  };
  struct Sizes {
    size_t x, ranks;
    std::vector<Part> gate_up;
  };

  explicit PassMemory(const Sizes& sizes);  // throws std::bad_alloc
  bool holds(const Sizes& sizes) const;
  int64_t bytes() const;

  sys::Mapping x;                     // bf16 [tokens][H]
  sys::Mapping ranks;                 // float32 [pairs][gate, up][R]; may be empty
  std::vector<sys::Mapping> gate_up;  // per pool: bf16, by saved_tile(); may be empty

 private:
  std::vector<int> nodes_;  // of gate_up
};

// Memory that no pass uses at the moment. It is freed with the last layer.
class SpareMemory {
 public:
  static std::shared_ptr<SpareMemory> of_process();

  // Returns the smallest spare memory that holds the sizes, or new memory. New memory replaces
  // spare memory that is too small, so there are never more pieces than passes were kept at the
  // same time. Throws std::bad_alloc.
  PassMemory take(const PassMemory::Sizes& sizes);
  void give_back(PassMemory&& memory) noexcept;
  // Frees the memory and returns its bytes.
  int64_t clear();

 private:
  std::vector<PassMemory> memory_;
};

}  // namespace kt
