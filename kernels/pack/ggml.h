// ggml's formats: converts raw blocks of rows to the packed layout.
#pragma once
#include "pack.h"

namespace kt {

PackError check_ggml(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row);

void pack_ggml(const MatrixLayout& layout, const MatrixSource& source, int64_t tile, uint8_t* dst);

// W[n, k] of a packed tile as float32.
float ggml_weight(const MatrixLayout& layout, const uint8_t* tile, int64_t n, int64_t k);

}  // namespace kt
