// Plain data types shared by all parts of the core. They have no behaviour and no STL containers,
// because the files compiled once per instruction set include this header.
#pragma once
#include <cstdint>

namespace kt {

// Element type of tensors that cross the API (hidden states, source weights).
enum class DType : int { kBF16 = 0, kFP16 = 1, kFP32 = 2 };

// Always inlined; see KT_INLINE in format.h.
[[gnu::always_inline]] constexpr int dtype_bytes(DType t) { return t == DType::kFP32 ? 4 : 2; }

// The kind of kernel for an expert's matrix products. kAuto chooses by tokens per expert.
enum class KernelKind : int { kAuto = 0, kVector = 1, kTile = 2 };

}  // namespace kt
