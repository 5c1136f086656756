// Memory that forward passes keep until their backward passes, shared by the layers of a process:
// what one pass no longer needs, the next one takes, whichever layer it is of.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../sys/numa_memory.h"

namespace kt {

// 2 H + 4 k I bytes a token, or 2 H where gate and up are computed again.
struct PassMemory {
  struct Part {
    size_t bytes;
    int node;  // NUMA node
  };
  struct Sizes {
    size_t x;
    std::vector<Part> gate_up;
  };

  explicit PassMemory(const Sizes& sizes);  // throws std::bad_alloc
  bool holds(const Sizes& sizes) const;
  int64_t bytes() const;

  sys::Mapping x;                     // bf16 [tokens][H]
  std::vector<sys::Mapping> gate_up;  // per pool: bf16, by saved_tile(); may be empty

 private:
  std::vector<int> nodes_;  // of gate_up
};

// Freed with the last layer that shares it.
class SpareMemory {
 public:
  static std::shared_ptr<SpareMemory> of_process();

  // The smallest memory that holds the sizes, else a new one. A new one replaces memory that is too
  // small, so there is never memory for more passes than were kept at the same time. Throws
  // std::bad_alloc.
  PassMemory take(const PassMemory::Sizes& sizes);
  void give_back(PassMemory&& memory) noexcept;
  // Frees what is not in use; returns its bytes.
  int64_t clear();

 private:
  std::vector<PassMemory> memory_;
};

}  // namespace kt
