// The blocks of ggml's formats as files have them (structs and dequantisation of ggml:
// ggml-common.h and ggml-quants.c), taken apart.
#pragma once
#include <cstdint>

#include "kt/format.h"

namespace kt {

// One block of one row. Scales and codes are the numbers of kt/format.h.
struct GgmlBlock {
  uint16_t d = 0, m = 0;  // fp16
  // By sub-block, sub_bytes() each: the scale, then t where it has a byte of its own.
  uint8_t scales[16] = {};
  uint8_t q[256] = {};
};

// d of a block in a file, and m behind it where the format has one.
const uint8_t* ggml_d(WeightFormat format, const uint8_t* block);

GgmlBlock read_ggml_block(WeightFormat format, const uint8_t* block);

}  // namespace kt
