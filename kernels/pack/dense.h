// Dense sources: kept as bf16, or quantised.
#pragma once
#include "pack.h"

namespace kt {

PackError check_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                      int64_t* bad_row);

int64_t dense_scratch(const MatrixLayout& layout, DType type);

// Also does the checks of check_dense. If one fails, dst is incomplete.
PackError pack_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     float* scratch, uint8_t* dst, int64_t* bad_row);

}  // namespace kt
