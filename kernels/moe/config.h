// The configuration of a layer and the arguments of a pass, as plain data with checks.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "form.h"
#include "kt/kernel_table.h"

namespace kt {

// Settings tuned per machine. Results do not depend on them, except that gemm_min_rows selects the
// kind of kernel. 0 means the default.
struct LayerTuning {
  ByMatrix<int64_t>
      gemm_min_rows{};     // rows of an expert from which GEMM runs; default: the table's
  int64_t row_block = 0;   // rows per kernel call, a multiple of 32 up to kRowBlock (the default)
  int64_t task_bytes = 0;  // weights that a thread takes at a time in decode; default: kTaskBytes
};

struct LayerConfig {
  int64_t num_experts, top_k, hidden_size, intermediate_size;
  ByMatrix<MatrixForm> forms;  // without a gate, its form is ignored
  Activation activation;
  std::vector<uint8_t> on_cpu;  // [num_experts], 1 for the slots held here, which passes compute
  int64_t max_tokens;           // longer batches are computed in chunks of this size
  const KernelTable* table;
  KernelKind kind;
  LayerTuning tuning;
  bool weight_on_input = false;  // router weights multiply x instead of an expert's output

  // The matrices that an expert has.
  std::span<const Matrix> matrices() const {
    static constexpr Matrix kAll[] = {kGate, kUp, kDown};
    return std::span(kAll).subspan(activation.gated ? 0 : 1);
  }
  // The layouts of the matrices of which `inter` rows or columns belong to the intermediate
  // dimension. A gate that experts do not have is [0, H].
  ByMatrix<MatrixLayout> layouts(int64_t inter) const {
    return {forms[kGate].layout(activation.gated ? inter : 0, hidden_size),
            forms[kUp].layout(inter, hidden_size), forms[kDown].layout(hidden_size, inter)};
  }
  // The layout of a whole matrix.
  MatrixLayout layout(Matrix m) const { return layouts(intermediate_size)[m]; }
};

// The column orders of gate and up (act-order), each a permutation of the H columns: column j of
// the source is column order[j] of the matrix. Null: no order.
using ColumnOrders = std::array<const int32_t*, 2>;

// Row-major weights of one expert: gate and up [I, H], down [H, I]. Biases are float32 and may be
// null. Everything of a gate that the experts do not have is null.
struct ExpertSource {
  ByMatrix<WeightSource> weights;
  ByMatrix<const float*> bias;
  ColumnOrders order{};
};

// The source of a slot.
struct SlotSource {
  int64_t slot;
  ExpertSource source;
};

// Arguments of one forward pass. The pointers must stay valid until its job is done.
struct ForwardArgs {
  const void* x;  // [tokens, H] of dtype
  DType dtype;
  int64_t tokens;
  const int64_t* ids;    // [tokens, top_k], slots
  const float* weights;  // [tokens, top_k]
  void* out;             // [tokens, H] of dtype, or null
  const float* add;      // [tokens, H], added before rounding, or null
  float* partial;        // [tokens, H]: receives the unrounded sum, or null
};

// All throw std::invalid_argument naming the value and what is accepted.
void check_config(const LayerConfig& config);
void need_entry_per_expert(const std::vector<uint8_t>& on_cpu, int64_t num_experts);
void check_expert(const LayerConfig& config, const SlotSource& expert);
void need_matrix(const LayerConfig& config, int matrix);
void check_pass(const ForwardArgs& args);

}  // namespace kt
