// Searches arrays for values that are not finite, with all threads of a team.
#pragma once
#include <cstdint>
#include <vector>

#include "../sys/team.h"

namespace kt {

// n values: bf16 or float32.
struct FloatArray {
  const void* data;
  int64_t n;
  bool bf16;
};

// Whether no value is NaN or infinite. Returns once the team has searched the arrays.
bool all_finite(sys::Team& team, std::vector<FloatArray> arrays);

}  // namespace kt
