// The part of the kernel table that only training needs: gradients of the products, of the
// activation and of low-rank adapters.
//
// Gradients and adapter activations are rows of bf16 values in the form that the table's GEMM
// kernel of bf16 weights takes (kernel_table.h, format[kBF16].gemm), whatever the format of the
// weights. A "tile" of values is m rows of 32 floats. Every sum has a fixed order, independent of
// threads.
#pragma once
#include "kt/kernel_table.h"

namespace kt {

// Columns computed by one call of a transposed product: two tiles of values, starting at a multiple
// of this number.
constexpr int64_t kTransposedColumns = 64;

// out[r * 32 + c] = sum_n A[r,n] * W[n, column + c] for 32 columns, and out[out_stride + ...] for
// the next 32 if the matrix has them. `tiles` is the first packed tile of W (not transposed), and
// tile_stride is the bytes from one tile to the next. A has 32 columns for each tile, zeros past
// the rows of W; if the table has turned kernels, `a` is what their `rows` made of A. `out` needs
// the extra room of a TileProduct; `scratch` has transposed_scratch() bytes, aligned to 64.
using TransposedProduct = void (*)(const uint8_t* tiles, int64_t tile_stride,
                                   const MatrixLayout& layout, int64_t column, const ActRows& a,
                                   int64_t m, uint8_t* scratch, float* out, int64_t out_stride);

KT_INLINE int64_t transposed_scratch(int64_t rows) {
  return round_up(rows, kTileRows) * kTransposedColumns * 2;
}

// One of the products whose sum TurnedKernels::sum computes: of rows of A and 64 columns of W.
struct TurnedTerm {
  const uint8_t* weights;  // what TurnedKernels::weights made of W
  const uint8_t* rows;     // what TurnedKernels::rows made of A, from row 0 on
  int64_t tiles;           // of W, and as many times 32 columns of A
};

// Transposed products in parts, for tables whose unit multiplies with the transposes of W and A.
// Several products are added up in the unit, and W is turned once for all rows.
struct TurnedKernels {
  // By WeightFormat. The transpose of 64 columns of W, or as many as the matrix has from `column`
  // on, as in TransposedProduct. `out` gets transposed_scratch(layout.rows) bytes, aligned to 64.
  void (*const* weights)(const uint8_t* tiles, int64_t tile_stride, const MatrixLayout& layout,
                         int64_t column, uint8_t* out);

  // From up to 32 rows of bf16 values: row index[r], or r if index is null, of rows that lie
  // `stride` values apart. Columns past `columns` and rows past m become zeros. `out` gets 2 KB for
  // each 32 columns.
  void (*rows)(const uint16_t* rows, int64_t stride, const int32_t* index, int64_t m,
               int64_t columns, uint8_t* out);

  // out[r * 32 + c] = the sum over the terms of the products of row first + r with column c of the
  // first 32, and out[out_stride + ...] with those of the next 32 if columns is 64. r < m; `first`
  // is a multiple of 32. `out` needs the extra room of a TileProduct.
  void (*sum)(const TurnedTerm* terms, int count, int64_t columns, int64_t first, int64_t m,
              float* out, int64_t out_stride);
};

// Selects the random numbers of dropout, which are Philox 4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011). The number of column c is word c % 4 of the counter
// (c / 4, token, expert, matrix) under the key (low, high half of the seed).
struct DropKey {
  uint64_t seed;
  uint32_t threshold;  // numbers below it are dropped: p * 2^32
  float scale;         // 1 / (1 - p), which multiplies the kept values
  uint32_t expert, matrix;
};

// The output of SwiGLU's backward pass: tiles of m rows, and one dot product per row.
struct SwigluGradients {
  float *h, *gate, *up;
  float* dot;
};

// A row of values in a weighted sum.
struct WeightedRow {
  const float* values;
  float weight;
};

struct TrainingKernels {
  const TransposedProduct* transposed;  // by WeightFormat

  // Null for tables whose transposed products take rows of A as they are.
  const TurnedKernels* turned;

  // For one tile: h = act(gate) * up (Activation), the gradients of gate and up for a gradient
  // weight[r] * v of h, and dot[r] = sum_n v * h. gate and up are bf16 and include their biases.
  void (*swiglu_backward)(const uint16_t* gate, const uint16_t* up, const float* v,
                          const float* weight, const Activation& act, int64_t m,
                          const SwigluGradients& out);

  // out[i * 32 + c] += sum_r a[r * a_stride + i] * b[r * b_stride + c] for i < n and 32 columns c,
  // in float32 and ascending r.
  void (*outer)(const float* a, int64_t a_stride, int64_t n, const float* b, int64_t b_stride,
                int64_t m, float* out);

  // Gathers a tile of m rows: 32 columns of the bf16 rows index[r], `stride` values apart,
  // multiplied by factor[r] unless null. Columns past `valid` become zeros.
  void (*columns)(const uint16_t* rows, int64_t stride, const int32_t* index, const float* factor,
                  int64_t m, int64_t valid, float* out);

  // to += from, then += bias: tiles of m rows, 32 values of bias. Either may be null.
  void (*add)(float* to, const float* from, const float* bias, int64_t m);

  // Row r of m rows that lie `stride` floats apart, aligned to 64 bytes: to = values + more, or
  // values if more is null. They go past the caches: nobody reads them soon.
  void (*keep)(const float* values, const float* more, int64_t m, float* to, int64_t stride);

  // n columns of a sum of sums, rounded to bf16: of rows [0, end[0]), of rows [end[0], end[1]) and
  // so on. Rows are read as `keep` wrote them.
  void (*sum_rows)(const WeightedRow* rows, const int* end, int sums, int64_t n, uint16_t* out);

  // Dropout of columns [column, column + n) of a token's row; column is a multiple of 4, and x has
  // room for n rounded up to 32.
  void (*drop)(const DropKey& key, uint32_t token, int64_t column, int64_t n, float* x);
};

}  // namespace kt
