// The interface between the core (moe/), which is independent of the instruction set, and the
// kernels (isa/): one plain struct of function pointers per instruction set. Each isa/ object
// exports one table.
#pragma once
#include <cstdint>

#include "kt/layout.h"
#include "kt/types.h"

namespace kt {

// The type of activation rows (x or h) in a product, where they are the A operand. "Columns" are
// the layout's cols_padded; those past K hold zeros.
//   kFloat       float32 that holds bf16 values
//   kBF16        bf16
//   kInt8Row     int8 q in [-127, 127]; x = q * scale, one scale and one sum of q per row
//   kInt16Group  bf16 values in fixed point, for integer products with weights that have a scale
//                per group of columns. For each 32 columns: int8 high[32], then int8 low[32].
//                q = 256 * high + low in [-32639, 32639]; x = q * scale, with one power-of-two
//                scale per 32 columns; one sum of q per 16 columns. Exact for values down to 2^-7
//                of the largest of the 32. The error of smaller values is at most half a scale,
//                which is under 2^-14 of the largest.
// A NaN or infinity in a row of an integer kind makes the scale NaN, and so the row's results.
enum class ActKind : int { kFloat = 0, kBF16 = 1, kInt8Row = 2, kInt16Group = 3 };

constexpr int64_t kActGroup = 32;  // columns per scale of kInt16Group
constexpr int64_t kSumGroup = 16;  // columns per sum of kInt16Group

KT_INLINE int64_t act_bytes(ActKind kind) {  // per column
  return kind == ActKind::kFloat ? 4 : kind == ActKind::kInt8Row ? 1 : 2;
}
KT_INLINE int64_t act_scales(ActKind kind, int64_t columns) {  // per row
  return kind == ActKind::kInt8Row ? 1 : kind == ActKind::kInt16Group ? columns / kActGroup : 0;
}
KT_INLINE int64_t act_sums(ActKind kind, int64_t columns) {  // per row
  return kind == ActKind::kInt8Row ? 1 : kind == ActKind::kInt16Group ? columns / kSumGroup : 0;
}

// Activation rows. For most kernels a row is contiguous, and row r of the product is stored row
// index[r] (or r if index is null). Kernels with `blocked` rows take blocks of 16 rows, in the
// order in which the tile unit reads them: 64 bytes of each of the 16 rows (1 KB), then the next 64
// bytes of each. A block has the size of 16 rows. Blocked rows have no index.
struct ActRows {
  const uint8_t* data;
  int64_t stride;        // bytes of a row: columns * act_bytes
  const float* scale;    // [row][scales]
  const int32_t* sum;    // [row][sums]
  int64_t scales, sums;  // per row
  const int32_t* index;  // null for contiguous rows

  ActRows from(int64_t row) const {  // the rows from `row` on; if blocked, from a whole block on
    if (index) return {data, stride, scale, sum, scales, sums, index + row};
    return {
        data + row * stride, stride, scale + row * scales, sum + row * sums, scales, sums, nullptr};
  }
};

constexpr int64_t kBlockRows = 16;   // rows of a block of A
constexpr int64_t kChunkBytes = 64;  // of each row, consecutive in a block

// out[r * 32 + n] = sum_k A[r,k] * W[n,k] for one packed tile, dequantised, and r < m. GEMM kernels
// may read up to 31 rows past m without using them, and write as many to out, so both buffers need
// room for them.
using TileProduct = void(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                         int64_t m, float* out);

// Converts a row of k values to the A operand: writes k_padded elements (zeros past k) to dst, and
// the scales and sums if the kind has them. row_absmax is the row's largest absolute value if the
// caller knows it (a pool holds only a part of the row), otherwise -1; only kInt8Row uses it. Kinds
// other than kInt8Row may be converted in pieces of multiples of 32 columns.
using QuantiseRow = void (*)(const void* src, DType dtype, int64_t k, int64_t k_padded,
                             float row_absmax, uint8_t* dst, float* scale, int32_t* sum);

// The function f between the first products and down. An expert with a gate has h = f(gate) * up;
// one without has h = f(up).
enum class ActFunction : int {
  kSilu = 0,      // x * sigmoid(x)
  kGelu = 1,      // x * P(X < x) of the standard normal distribution
  kGeluTanh = 2,  // its approximation 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
  kRelu2 = 3,     // max(x, 0)^2
  // Two with a gate only. h = situ_beta * tanh(gate / situ_beta) * sigmoid(gate) * up, where up
  // becomes situ_linear_beta * tanh(up / situ_linear_beta) if that is > 0 (SituGLU, Kimi-K3).
  kSitu = 4,
  // h = min(silu(gate), limit) * up, with up clamped to [-limit, limit], if limit > 0 (Step-3.5).
  kSwigluStep = 5,
};
constexpr int kActFunctions = 6;

struct Activation {
  float limit = 0;  // > 0: SwiGLU clamps gate from above, up to [-limit, limit]
  float alpha = 0;  // SwiGLU; != 0: gate * sigmoid(alpha * gate) * (up + 1)
  ActFunction function = ActFunction::kSilu;
  bool gated = true;  // whether experts have a gate
  float situ_beta = 1, situ_linear_beta = 0;

  bool is_swiglu() const { return gated && function == ActFunction::kSilu; }
};

// A kernel that multiplies with the weights of a format.
struct ProductKernel {
  ActKind act;
  bool blocked;          // needs A rows in blocks
  TileProduct& product;  // a reference, so that a row without a kernel does not compile
};

struct FormatKernels {
  WeightFormat format;
  ProductKernel gemv;  // few rows: streams the weights from memory once for up to 4 rows
  ProductKernel gemm;  // many rows: unpacks the weights, if necessary, once for all rows
  int gemm_min_rows;   // kAuto: rows of an expert from which gemm is used
};

struct TrainingKernels;  // kt/training.h

struct KernelTable {
  const char* name;             // "avx2", "avx512", ...
  uint32_t features;            // bits of sys::Feature that must be present
  const FormatKernels* format;  // by WeightFormat
  QuantiseRow quantise[4];      // by ActKind
  // out = h (Activation) for one tile of 32 columns, m rows of 32 floats each. gate is null if
  // experts have none. Row r of gate and up is first multiplied by weight[r], then biases are
  // added. weight and biases may be null; out may be gate or up.
  void (*activate)(const float* gate, const float* up, const float* gate_bias, const float* up_bias,
                   const float* weight, const Activation& act, int64_t m, float* out);
  // Largest absolute value of a row; NaN if the row has a NaN or an infinity.
  float (*absmax)(const void* src, DType dtype, int64_t k);
  // acc[token[r] * 32 + n] += weight[r] * (out[r * 32 + n] + bias[n]), in ascending r. bias may be
  // null; without weight, each is 1.
  void (*merge)(const float* out, const float* bias, const float* weight, const int32_t* token,
                int64_t m, float* acc);
  // Writes n values: dst = sum over p of part[p][i] (ascending p), plus add[i] if add is not null,
  // converted to dtype with one rounding.
  void (*finish)(const float* const* part, int parts, const float* add, int64_t n, void* dst,
                 DType dtype);
  void (*thread_begin)();  // tile configuration; called by each worker around a job
  void (*thread_end)();
  const TrainingKernels* training;
};

// The tables linked into this module, best first, ending with null.
extern const KernelTable* const kKernelTables[];

}  // namespace kt
