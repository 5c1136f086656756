// Dense sources: taken over as bf16, or quantised.
#pragma once
#include "pack.h"

namespace kt {

PackError check_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                      int64_t* bad_row);

int64_t dense_scratch(const MatrixLayout& layout, DType type);

// Checks on the way what check_dense checks; then dst is left unfinished.
PackError pack_dense(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     float* scratch, uint8_t* dst, int64_t* bad_row);

}  // namespace kt
