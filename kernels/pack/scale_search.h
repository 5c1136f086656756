// The scale of a group of 4-bit codes that loses least.
#pragma once
#include <cstdint>

#include "kt/types.h"

namespace kt {

// The fp16 scale s for which codes q = clamp(rint(w / s), -8, 7) have about the least squared error
// sum of (w - q * s)^2, over n weights, a multiple of 32. s has the sign that gives the largest
// weight a negative code. `plain` is fp16(absmax / 7), finite, and what is returned where the fp16
// range leaves no choice. The same on every machine.
uint16_t search_scale(const void* weights, DType type, int64_t n, uint16_t plain);

}  // namespace kt
