// Whether gradients are finite, looked at by all threads of a team.
#pragma once
#include <cstdint>

#include "../sys/team.h"

namespace kt {

// n values: bf16 or float32.
struct FloatArray {
  const void* data;
  int64_t n;
  bool bf16;
};

// Blocks.
bool all_finite(sys::Team& team, const FloatArray& values);

}  // namespace kt
