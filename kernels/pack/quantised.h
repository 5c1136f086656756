// Quantised sources: checks codes and scales, and keeps them bit for bit.
#pragma once
#include "pack.h"

namespace kt {

PackError check_quantised(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                          int64_t* bad_row);

void pack_quantised(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                    uint8_t* dst);

}  // namespace kt
