#include "state.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "../sys/need.h"

namespace kt {
namespace {

// Experts without gate share what is kept for gate and for up: rows of x, column orders.
LayerConfig gate_like_up(LayerConfig c) {
  if (c.activation.gated) return c;
  c.forms[kGate] = c.forms[kUp];
  c.tuning.gemm_min_rows[kGate] = c.tuning.gemm_min_rows[kUp];
  return c;
}

// Splits I into one contiguous part per pool, in proportion to the pools' threads, and in units
// that no group or tile crosses.
std::vector<PoolPart> split_pools(const sys::Team& team, const LayerConfig& c, int64_t held) {
  int64_t unit = 1;
  for (const MatrixForm& form : c.forms) unit = std::lcm(unit, form.layout(1, 1).split_unit());
  const int64_t units = ceil_div(c.intermediate_size, unit);
  std::vector<PoolPart> parts;
  int64_t threads_before = 0;
  for (int p = 0; p < team.pools(); ++p) {
    const int64_t first = units * threads_before / team.threads();
    threads_before += team.threads(p);
    const int64_t last = units * threads_before / team.threads();
    PoolPart part;
    part.begin = std::min(first * unit, c.intermediate_size);
    part.size = std::min(last * unit, c.intermediate_size) - part.begin;
    part.layout = c.layouts(part.size);
    part.memory = sys::Mapping(part.size ? size_t(held * part.expert_bytes()) : 0, team.node(p));
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace

void OrderTable::resize(int64_t experts, int64_t hidden) {
  width = hidden;
  memory = sys::Mapping(size_t(experts * 2 * hidden) * sizeof(int32_t));
  present.assign(size_t(experts), 0);
  same.assign(size_t(experts), 1);
}

void OrderTable::keep(int64_t position, const ColumnOrders& source) {
  present[size_t(position)] = source[kGate] || source[kUp];
  if (!present[size_t(position)] && !any) return;
  if (!any)  // the experts that were loaded before need orders, too
    for (int64_t i = 0; i < int64_t(present.size()); ++i)
      for (Matrix m : {kGate, kUp}) std::iota(row(i, m), row(i, m) + width, 0);
  for (Matrix m : {kGate, kUp})
    if (source[m])
      std::copy_n(source[m], width, row(position, m));
    else
      std::iota(row(position, m), row(position, m) + width, 0);
  const int32_t* gate = row(position, kGate);
  same[size_t(position)] = std::equal(gate, gate + width, row(position, kUp));
  any = true;
}

void LayerState::keep_rest(int64_t slot, const ByMatrix<const float*>& source,
                           const ColumnOrders& orders) {
  order.keep(position[size_t(slot)],
             config.activation.gated ? orders : ColumnOrders{orders[kUp], orders[kUp]});
  for (int m = 0; m < kMatrices; ++m) {
    BiasTable& table = bias[m];
    if (!source[m] && !table.any) continue;
    table.any = true;  // first, so that a child forked during the copy must write the row again
    float* row = table.row(position[size_t(slot)]);
    if (source[m])
      std::copy_n(source[m], table.width, row);
    else
      std::fill_n(row, table.width, 0.0f);
  }
}

LayerState::LayerState(const sys::Team& team, LayerConfig given)
    : config(gate_like_up(std::move(given))), timings(team.threads()) {
  const LayerConfig& c = config;
  need(team.pools() <= kMaxPools, std::to_string(team.pools()) + " pools; at most " +
                                      std::to_string(kMaxPools) + " are supported");
  check_config(c);
  loaded.resize(c.on_cpu.size());
  on_cpu = c.on_cpu;
  for (uint8_t here : c.on_cpu) position.push_back(here ? held++ : -1);
  pools = split_pools(team, c, held);
  for (int m = 0; m < kMatrices; ++m) {
    bias[m].width = m == kDown ? c.hidden_size : c.intermediate_size;
    bias[m].memory =
        sys::Mapping(size_t(held * round_up(bias[m].width, kTileRows)) * sizeof(float));
  }
  order.resize(held, c.hidden_size);
  workspace = workspace_for(
      team, {c.max_tokens, c.top_k, c.num_experts, c.hidden_size, c.intermediate_size});
}

}  // namespace kt
