#include "config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "../sys/need.h"
#include "../sys/task_queue.h"
#include "workspace.h"

namespace kt {
namespace {

// Checks that the numbers of a chunk's tasks fit (sys/task_queue.h). All sizes are in range.
void check_tasks(const LayerConfig& c) {
  const int64_t pairs = c.max_tokens * c.top_k;
  const int64_t tiles = ceil_div(std::max(c.hidden_size, c.intermediate_size), kTileRows);
  need(pairs <= sys::kMaxTasks &&
           std::min(pairs, c.num_experts + pairs / kItemRows) <= sys::kMaxTasks / tiles,
       "max_tokens " + std::to_string(c.max_tokens) + ": more than " +
           std::to_string(sys::kMaxTasks) + " tasks; use a lower number");
}

void check_order(const int32_t* order, int64_t columns, const std::string& where) {
  std::vector<uint8_t> seen(static_cast<size_t>(columns));
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t column = order[i];
    if (column < 0 || column >= columns || seen[size_t(column)])
      throw std::invalid_argument(where + ": column " + std::to_string(i) +
                                  " of the source is column " + std::to_string(column) +
                                  " of the matrix; expected a permutation of 0 to " +
                                  std::to_string(columns - 1));
    seen[size_t(column)] = 1;
  }
}

void check_activation(const Activation& a) {
  need_in_range("activation", int(a.function), 0, kActFunctions - 1);
  need(a.limit >= 0 && std::isfinite(a.limit),
       "swiglu_limit " + std::to_string(a.limit) + "; accepted: 0 or more");
  need(std::isfinite(a.alpha),
       "swiglu_alpha " + std::to_string(a.alpha) + "; accepted: a finite number");
  const bool step = a.function == ActFunction::kSwigluStep, situ = a.function == ActFunction::kSitu;
  need(a.gated || !(step || situ),
       "gated 0; activation " + std::to_string(int(a.function)) + " needs a gate; accepted: 1");
  need(a.is_swiglu() || step || a.limit == 0,
       "swiglu_limit " + std::to_string(a.limit) + "; this activation has none; accepted: 0");
  need(a.is_swiglu() || a.alpha == 0,
       "swiglu_alpha " + std::to_string(a.alpha) + "; this activation has none; accepted: 0");
  need(a.situ_beta > 0 && std::isfinite(a.situ_beta),
       "situ_beta " + std::to_string(a.situ_beta) + "; accepted: more than 0");
  need(a.situ_linear_beta >= 0 && std::isfinite(a.situ_linear_beta),
       "situ_linear_beta " + std::to_string(a.situ_linear_beta) + "; accepted: 0 or more");
}

}  // namespace

void need_entry_per_expert(const std::vector<uint8_t>& on_cpu, int64_t num_experts) {
  need(int64_t(on_cpu.size()) == num_experts,
       "on_cpu needs one entry per expert: it has " + std::to_string(on_cpu.size()) +
           ", num_experts is " + std::to_string(num_experts));
}

void check_config(const LayerConfig& c) {
  need(c.num_experts >= 1, "num_experts " + std::to_string(c.num_experts) + "; must be positive");
  need_entry_per_expert(c.on_cpu, c.num_experts);
  need_in_range("top_k", c.top_k, 1, kMaxTopK);
  need_in_range("max_tokens", c.max_tokens, 1, sys::kMaxTasks);
  need_in_range("hidden size", c.hidden_size, 1, kMaxColumns);
  need_in_range("intermediate size", c.intermediate_size, 1, kMaxColumns);
  for (Matrix m : c.matrices())
    check_form(c.forms[m], m == kDown ? c.intermediate_size : c.hidden_size,
               kMatrixNames[m] + std::string(": "));
  check_activation(c.activation);
  need_in_range("kind", int(c.kind), 0, int(KernelKind::kTile));
  const LayerTuning& t = c.tuning;
  for (int64_t rows : t.gemm_min_rows)
    need(rows >= 0, "gemm_min_rows " + std::to_string(rows) + "; accepted: 0 or more");
  need(t.task_bytes >= 0, "task_bytes " + std::to_string(t.task_bytes) + "; accepted: 0 or more");
  need(t.row_block >= 0 && t.row_block <= kRowBlock && t.row_block % 32 == 0,
       "row_block " + std::to_string(t.row_block) + "; accepted: multiples of 32 up to " +
           std::to_string(kRowBlock));
  check_tasks(c);
}

void check_expert(const LayerConfig& c, const SlotSource& expert) {
  const std::string where = "expert slot " + std::to_string(expert.slot) + ", ";
  const ExpertSource& source = expert.source;
  for (Matrix m : c.matrices()) check_source(source.weights[m], where + kMatrixNames[m]);
  need(c.activation.gated || (!source.weights[kGate].data && !source.bias[kGate]),
       where + "gate: these experts have none; accepted: address 0");
  for (Matrix m : {kGate, kUp})
    if (const int32_t* order = expert.source.order[m])
      check_order(order, c.hidden_size, where + kMatrixNames[m]);
}

void need_matrix(const LayerConfig& c, int matrix) {
  need_in_range("matrix", matrix, c.matrices().front(), kDown);
}

// Called for every batch, so messages are only built if there is an error.
void check_pass(const ForwardArgs& a) {
  constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
  if (a.tokens < 0 || a.tokens > kMaxTokens) need_in_range("tokens", a.tokens, 0, kMaxTokens);
  if (uint32_t(a.dtype) > uint32_t(DType::kFP32)) need_dtype("dtype", a.dtype);
  if (!a.tokens) return;
  if (!a.out && !a.partial)
    throw std::invalid_argument("a forward pass needs an output: out and partial are address 0");
  if (!a.x || !a.ids || !a.weights)
    throw std::invalid_argument("x, ids and weights are needed: at least one is address 0");
}

}  // namespace kt
