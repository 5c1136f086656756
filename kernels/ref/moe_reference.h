// The whole MoE layer in double, written for clarity. Tests compare kernels and the engine with it.
// It rounds activations exactly where the product does and nowhere else; all sums are in double.
#pragma once
#include <cstdint>
#include <string>

namespace kt {

// How x and h are rounded, once each, before a matrix product.
enum class ActivationFormat : int {
  kBF16 = 0,     // to bfloat16, nearest-even
  kInt8Row = 1,  // to int8 with one float32 scale per row
};

// All tensors are contiguous, row-major. Weights are the dequantised values.
struct MoeReference {
  int64_t tokens = 0, top_k = 0, num_experts = 0, hidden_size = 0, intermediate_size = 0;
  const double* x = nullptr;        // [tokens, hidden_size]
  const int64_t* ids = nullptr;     // [tokens, top_k]; < 0 or >= num_experts: skipped
  const double* weights = nullptr;  // [tokens, top_k] router weights
  const double* gate = nullptr;     // [num_experts, intermediate_size, hidden_size]; null: no gate
  const double* up = nullptr;       // likewise; required
  const double* down = nullptr;     // [num_experts, hidden_size, intermediate_size]
  const bool* skip = nullptr;       // [num_experts], true: computed elsewhere; null: none
  const double* gate_bias = nullptr;  // [num_experts, intermediate_size] or null
  const double* up_bias = nullptr;    // likewise
  const double* down_bias = nullptr;  // [num_experts, hidden_size] or null
  ActivationFormat activation = ActivationFormat::kBF16;
  double swiglu_limit = 0.0;  // > 0: gate (in swiglustep, silu(gate)) is clamped from above, up to
                              // +-limit
  double swiglu_alpha = 0.0;  // != 0: gate * sigmoid(alpha * gate) * (up + 1)
  // act: silu, gelu, gelu_tanh or relu2. With a gate also situ and swiglustep, see hidden_of().
  std::string function = "silu";
  double situ_beta = 1.0, situ_linear_beta = 0.0;
  bool weight_on_input = false;  // router weights multiply the rounded x, not the output
};

// y [tokens, hidden_size] = sum over j of w_j * down_e(h), e = ids[t, j], where h is act(gate_e(x))
// * up_e(x), or act(up_e(x)) without a gate.
// Overwrites y. An id that occurs twice counts twice. A token without a computed expert gives
// zeros. A row of x with a NaN, or with an infinity in the int8 formats, gives a row of NaN if any
// expert is computed for it.
// Throws std::invalid_argument for negative sizes, missing tensors, or an unknown activation or
// activation format.
void moe_reference(const MoeReference& layer, double* y);

}  // namespace kt
