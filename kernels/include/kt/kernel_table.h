// The seam between the instruction-set-neutral core (moe/) and the kernels (isa/): one plain
// struct of function pointers per instruction set. Each isa/ object exports one table.
#pragma once
#include <cstdint>

#include "kt/format.h"
#include "kt/types.h"

namespace kt {

// Quantised activation rows, the A operand of a matrix product. For vector kernels a row is
// contiguous, and row r of the product is stored row index[r] (or r, when index is null). For
// tile kernels rows come in blocks of 16, as the tile unit reads them: 64 bytes of each of the
// 16 rows (1 KB), then the next 64 bytes of each. A block takes the bytes of 16 rows.
struct ActRows {
  const uint8_t* data;
  int64_t stride;        // bytes of a row, zero-padded to the layout's cols_padded
  const float* scale;    // [row] or [row][group]; float formats do not read it
  const int32_t* sum;    // sum of the int8 values per row or per row and group; likewise
  int64_t groups;        // scales per row
  const int32_t* index;  // null for contiguous rows

  ActRows from(int64_t row) const {  // the rows from `row` on (a whole block, for tile kernels)
    if (index) return {data, stride, scale, sum, groups, index + row};
    return {data + row * stride, stride, scale + row * groups, sum + row * groups, groups, nullptr};
  }
};

constexpr int64_t kBlockRows = 16;   // rows of a block of A
constexpr int64_t kChunkBytes = 64;  // of each row, side by side in a block

// out[r * 32 + n] = sum_k A[r,k] * W[n,k] of one packed tile, dequantised, for r < m. Tile kernels
// may read (not use) up to 31 rows past m and write as many to out, so both buffers have that
// much slack.
using TileProduct = void (*)(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                             int64_t m, float* out);

// Converts one row of k values to the A operand: writes k_padded elements (zeros past k) to dst,
// and scale and sum where the format has them. A NaN or infinity in a row with an integer
// format gives a NaN scale, so that this row's results are NaN. row_absmax is the row's largest
// absolute value where the caller knows it (a pool holds only a part of the row), -1 otherwise;
// formats without a scale per row ignore it.
using QuantiseRow = void (*)(const void* src, DType dtype, int64_t k, int64_t k_padded, int group,
                             float row_absmax, uint8_t* dst, float* scale, int32_t* sum);

struct Activation {
  float limit;  // > 0: gate clamped from above, up to [-limit, limit]
  float alpha;  // != 0: gate * sigmoid(alpha * gate) * (up + 1)
};

// h[r * h_stride + n] = act(gate + gate_bias) * (up + up_bias) for one tile of 32 columns, m
// rows; biases may be null. Float formats: h holds A elements (rounded to bf16); integer
// formats: h holds float32 to be quantised row by row afterwards. h_stride in bytes.
using SwigluTile = void (*)(const float* gate, const float* up, const float* gate_bias,
                            const float* up_bias, const Activation& act, int64_t m, uint8_t* h,
                            int64_t h_stride);

struct FormatKernels {
  int act_bytes;    // bytes per A element: 1 int8, 2 bf16, 4 float32 holding bf16 values
  bool quantise_h;  // h is float32 and needs QuantiseRow before the down product
  QuantiseRow quantise;
  SwigluTile swiglu;
  TileProduct vector;
  TileProduct tile;   // null where the instruction set has no tile unit
  int tile_min_rows;  // kAuto: rows from which `tile` is used
};

struct KernelTable {
  const char* name;   // "avx2", "avx512", ...
  uint32_t features;  // bits of sys::Feature that must be present
  FormatKernels format[kFormatCount];
  // Largest absolute value of a row; NaN if it holds a NaN or an infinity.
  float (*absmax)(const void* src, DType dtype, int64_t k);
  // acc[token[r] * 32 + n] += weight[r] * (out[r * 32 + n] + bias[n]) in ascending r. bias may
  // be null.
  void (*merge)(const float* out, const float* bias, const float* weight, const int32_t* token,
                int64_t m, float* acc);
  // Writes n values: dst = sum over p of part[p][i] (ascending p), plus add[i] when not null;
  // converted to dtype with one rounding.
  void (*finish)(const float* const* part, int parts, const float* add, int64_t n, void* dst,
                 DType dtype);
  void (*thread_begin)();  // tile configuration; called by each worker around a job
  void (*thread_end)();
};

// Tables linked into this module, best first, ending with null.
extern const KernelTable* const kKernelTables[];

}  // namespace kt
