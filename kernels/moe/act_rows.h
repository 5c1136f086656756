// A rows: activations in the form that the kernels read (kt/kernel_table.h). Their buffers, and the
// conversion of a row.
#pragma once
#include <cstdint>

#include "../sys/numa_memory.h"
#include "kt/kernel_table.h"

namespace kt {

// Rows past the last one that a GEMM kernel may touch.
constexpr int64_t kRowSlack = 32;

// Addresses of rows, and of their scales and sums, which are per row or per row and group.
struct RowPointers {
  uint8_t* data;
  float* scale;
  int32_t* sum;
};
struct ActBuffer {
  sys::Mapping data, scale, sum;
  RowPointers pointers() const;
};

template <class T> T* as(const sys::Mapping& m) { return reinterpret_cast<T*>(m.data()); }

// Rows of `columns` padded columns.
ActRows act_rows(ActKind act, int64_t columns, const RowPointers& at);

// The rows from `row` on in a buffer for both kernels of a format, in which every row has the size
// of the larger kind.
ActRows act_rows(const FormatKernels& kernels, bool gemm, int64_t columns, const ActBuffer& buffer,
                 int64_t row);

// Converts k values to row `row`, which must not be blocked (QuantiseRow of kt/kernel_table.h).
void quantise_row(const KernelTable& table, ActKind act, const void* src, DType dtype, int64_t k,
                  int64_t padded, float absmax, const ActRows& to, int64_t row);

// The address of byte 0 of a row in a buffer of blocked rows, and the copy of a row to one.
inline uint8_t* blocked_row(uint8_t* rows, int64_t stride, int64_t row) {
  return rows + row / kBlockRows * kBlockRows * stride + row % kBlockRows * kChunkBytes;
}
void copy_to_blocks(const uint8_t* src, int64_t stride, uint8_t* rows, int64_t row);

}  // namespace kt
