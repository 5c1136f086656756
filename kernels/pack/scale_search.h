// Searches the scale of a group of 4-bit codes with the least error.
#pragma once
#include <cstdint>

#include "kt/types.h"

namespace kt {

// The fp16 scale s with nearly the least squared error, sum of (w - q * s)^2, for codes q =
// clamp(rint(w / s), -8, 7) of n weights, a multiple of 32. The sign of s gives the largest weight
// a negative code. Returns `plain`, fp16(absmax / 7), which is finite, if no better fp16 scale is
// in range. Deterministic on all machines.
uint16_t search_scale(const void* weights, DType type, int64_t n, uint16_t plain);

}  // namespace kt
