#include "layer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "../pack/pack.h"
#include "../sys/need.h"
#include "forward.h"
#include "pack_job.h"
#include "packed.h"

namespace kt {
namespace {

// Of one pool's part of I.
ByMatrix<MatrixLayout> layouts_of(const LayerConfig& c, int64_t part) {
  return {c.forms[kGate].layout(part, c.hidden_size), c.forms[kUp].layout(part, c.hidden_size),
          c.forms[kDown].layout(c.hidden_size, part)};
}

// Splits I into one contiguous part per pool, in units that no group or tile crosses, in
// proportion to the pools' threads.
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
    part.layout = layouts_of(c, part.size);
    part.memory = sys::Mapping(part.size ? size_t(held * part.expert_bytes()) : 0, team.node(p));
    parts.push_back(std::move(part));
  }
  return parts;
}

// Tasks of a chunk are numbered (kernels/sys/task_queue.h). All sizes are in range.
void check_tasks(const LayerConfig& c) {
  const int64_t pairs = c.max_tokens * c.top_k;
  const int64_t tiles = ceil_div(std::max(c.hidden_size, c.intermediate_size), kTileRows);
  need(pairs <= sys::kMaxTasks &&
           std::min(pairs, c.num_experts + pairs / kItemRows) <= sys::kMaxTasks / tiles,
       "max_tokens " + std::to_string(c.max_tokens) + ": more than " +
           std::to_string(sys::kMaxTasks) + " tasks; a lower one is accepted");
}

void need_entry_per_expert(const std::vector<uint8_t>& on_cpu, int64_t num_experts) {
  need(int64_t(on_cpu.size()) == num_experts,
       "on_cpu needs one entry per expert: it has " + std::to_string(on_cpu.size()) +
           ", num_experts is " + std::to_string(num_experts));
}

void check(const sys::Team& team, const LayerConfig& c) {
  need(team.pools() <= kMaxPools, std::to_string(team.pools()) + " pools; at most " +
                                      std::to_string(kMaxPools) + " are supported");
  need(c.num_experts >= 1, "num_experts " + std::to_string(c.num_experts) + "; must be positive");
  need_entry_per_expert(c.on_cpu, c.num_experts);
  need_in_range("top_k", c.top_k, 1, kMaxTopK);
  need_in_range("max_tokens", c.max_tokens, 1, sys::kMaxTasks);
  need_in_range("hidden size", c.hidden_size, 1, kMaxColumns);
  need_in_range("intermediate size", c.intermediate_size, 1, kMaxColumns);
  for (int m = 0; m < kMatrices; ++m)
    check_form(c.forms[m], m == kDown ? c.intermediate_size : c.hidden_size,
               kMatrixNames[m] + std::string(": "));
  need(c.activation.limit >= 0 && std::isfinite(c.activation.limit),
       "swiglu_limit " + std::to_string(c.activation.limit) + "; 0 or more is accepted");
  need(std::isfinite(c.activation.alpha),
       "swiglu_alpha " + std::to_string(c.activation.alpha) + "; a finite one is accepted");
  need_in_range("kind", int(c.kind), 0, int(KernelKind::kTile));
  const LayerTuning& t = c.tuning;
  for (int64_t rows : t.gemm_min_rows)
    need(rows >= 0, "gemm_min_rows " + std::to_string(rows) + "; 0 or more is accepted");
  need(t.task_bytes >= 0, "task_bytes " + std::to_string(t.task_bytes) + "; 0 or more is accepted");
  need(t.row_block >= 0 && t.row_block <= kRowBlock && t.row_block % 32 == 0,
       "row_block " + std::to_string(t.row_block) + "; multiples of 32 up to " +
           std::to_string(kRowBlock) + " are accepted");
  check_tasks(c);
}

void check_order(const int32_t* order, int64_t columns, const std::string& where) {
  std::vector<uint8_t> seen(static_cast<size_t>(columns));
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t column = order[i];
    if (column < 0 || column >= columns || seen[size_t(column)])
      throw std::invalid_argument(where + ": column " + std::to_string(i) +
                                  " of the source is column " + std::to_string(column) +
                                  " of the matrix; a permutation of 0 to " +
                                  std::to_string(columns - 1) + " is needed");
    seen[size_t(column)] = 1;
  }
}

void need_matrix(int matrix) {
  need(matrix >= 0 && matrix < kMatrices,
       "matrix " + std::to_string(matrix) + "; 0 to 2 is accepted");
}

// Slots that are being written: not loaded, since a child forked meanwhile has parts of them. Then
// they are as before, or loaded.
class Unloaded {
 public:
  Unloaded(std::vector<uint8_t>& loaded, const std::vector<SlotSource>& experts)
      : loaded_(loaded), experts_(experts) {
    for (const SlotSource& expert : experts)
      then_.push_back(std::exchange(loaded_[size_t(expert.slot)], 0));
  }
  ~Unloaded() {
    for (size_t i = 0; i < then_.size(); ++i) loaded_[size_t(experts_[i].slot)] = then_[i];
  }
  Unloaded(const Unloaded&) = delete;
  Unloaded& operator=(const Unloaded&) = delete;
  void succeeded() { std::fill(then_.begin(), then_.end(), 1); }

 private:
  std::vector<uint8_t>& loaded_;
  const std::vector<SlotSource>& experts_;
  std::vector<uint8_t> then_;
};

// Between two passes, since the team runs one job at a time.
class ChangeOfSlots : public sys::Job {
 public:
  ChangeOfSlots(std::shared_ptr<LayerState> layer, std::vector<uint8_t> on_cpu)
      : layer_(std::move(layer)), on_cpu_(std::move(on_cpu)) {}
  void run(sys::Worker& worker) noexcept override {
    if (worker.rank != 0) return;
    // Atomic, since a stream's poller looks at the slots of a batch before it makes a job.
    for (size_t slot = 0; slot < on_cpu_.size(); ++slot)
      std::atomic_ref(layer_->on_cpu[slot]).store(on_cpu_[slot], std::memory_order_relaxed);
  }

 private:
  const std::shared_ptr<LayerState> layer_;
  const std::vector<uint8_t> on_cpu_;
};

// Called for every batch: the messages are not made where nothing is wrong.
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
  if (!any)  // also those that came before
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
  order.keep(position[size_t(slot)], orders);
  for (int m = 0; m < kMatrices; ++m) {
    BiasTable& table = bias[m];
    if (!source[m] && !table.any) continue;
    table.any = true;  // first: a child forked in the middle of the copy must write the row again
    float* row = table.row(position[size_t(slot)]);
    if (source[m])
      std::copy_n(source[m], table.width, row);
    else
      std::fill_n(row, table.width, 0.0f);
  }
}

MoeLayer::MoeLayer(std::shared_ptr<sys::Team> team, LayerConfig config)
    : team_(std::move(team)), state_(std::make_shared<LayerState>(team_->threads())) {
  check(*team_, config);
  LayerState& s = *state_;
  s.config = std::move(config);
  const LayerConfig& c = s.config;
  s.loaded.resize(c.on_cpu.size());
  s.on_cpu = c.on_cpu;
  for (uint8_t here : c.on_cpu) s.position.push_back(here ? s.held++ : -1);
  s.pools = split_pools(*team_, c, s.held);
  const auto size_bias = [&](BiasTable& table, int64_t width) {
    table.width = width;
    table.memory = sys::Mapping(size_t(s.held * round_up(width, kTileRows)) * sizeof(float));
  };
  size_bias(s.bias[kGate], c.intermediate_size);
  size_bias(s.bias[kUp], c.intermediate_size);
  size_bias(s.bias[kDown], c.hidden_size);
  s.order.resize(s.held, c.hidden_size);
  s.workspace = workspace_for(
      team_, {c.max_tokens, c.top_k, c.num_experts, c.hidden_size, c.intermediate_size});
}

void MoeLayer::need_slot(int64_t slot) const {
  need(slot >= 0 && slot < config().num_experts && state_->position[size_t(slot)] >= 0,
       "expert slot " + std::to_string(slot) + " is not held on the CPU");
}

void MoeLayer::load(const std::vector<SlotSource>& experts) {
  std::vector<uint8_t> named(size_t(config().num_experts));
  for (const SlotSource& expert : experts) {
    need_slot(expert.slot);
    uint8_t& twice = named[size_t(expert.slot)];
    need(!twice, "expert slot " + std::to_string(expert.slot) + " is named twice");
    twice = 1;
    const std::string where = "expert slot " + std::to_string(expert.slot);
    for (int m = 0; m < kMatrices; ++m)
      check_source(expert.source.weights[m], where + ", " + kMatrixNames[m]);
    for (Matrix m : {kGate, kUp})
      if (const int32_t* order = expert.source.order[m])
        check_order(order, config().hidden_size, where + ", " + kMatrixNames[m]);
  }
  const auto job = std::make_shared<PackJob>(state_, experts, *team_);
  Unloaded meanwhile(state_->loaded, experts);
  team_->submit(job);
  job->wait();
  need(job->problem().empty(), job->problem());
  meanwhile.succeeded();
}

void MoeLayer::load_packed(int64_t slot, const ByMatrix<const uint8_t*>& tiles,
                           const ByMatrix<const float*>& bias) {
  need_slot(slot);
  for (int m = 0; m < kMatrices; ++m)
    need(tiles[m] != nullptr,
         std::string(kMatrixNames[m]) + ": address 0; packed tiles are needed");
  const auto job = std::make_shared<PackedLoad>(state_, slot, tiles, bias, team_->threads());
  state_->loaded[size_t(slot)] = 0;
  team_->submit(job);
  job->wait();
  const std::string problem = job->problem();
  state_->loaded[size_t(slot)] = problem.empty();
  need(problem.empty(), "expert slot " + std::to_string(slot) + ", " + problem);
}

void MoeLayer::save_packed(int64_t slot, int matrix, uint8_t* dst) const {
  need_slot(slot);
  need_matrix(matrix);
  need(dst != nullptr, "dst is address 0; room for the packed tiles is needed");
  need(!state_->order.present[size_t(state_->position[size_t(slot)])],
       "expert slot " + std::to_string(slot) +
           ": its columns are in another order (act-order), which packed weights cannot tell");
  const auto job = std::make_shared<PackedSave>(state_, slot, Matrix(matrix), dst);
  team_->submit(job);
  job->wait();
}

void MoeLayer::set_on_cpu(std::vector<uint8_t> on_cpu) {
  need_entry_per_expert(on_cpu, config().num_experts);
  for (size_t slot = 0; slot < on_cpu.size(); ++slot)
    need(!on_cpu[slot] || state_->loaded[slot],
         "expert slot " + std::to_string(slot) +
             " is not loaded on the CPU, so the CPU cannot compute it");
  const auto job = std::make_shared<ChangeOfSlots>(state_, std::move(on_cpu));
  team_->submit(job);
  job->wait();
}

std::shared_ptr<sys::Job> MoeLayer::submit(const ForwardArgs& args) {
  check_pass(args);
  auto job = std::make_shared<ForwardJob>(state_, args);
  team_->submit(job);
  return job;
}

void MoeLayer::unpack(int64_t slot, int matrix, float* dst) const {
  need_slot(slot);
  need_matrix(matrix);
  need(dst != nullptr, "dst is address 0; room for the weights is needed");
  const LayerConfig& c = config();
  for (int p = 0; p < team_->pools(); ++p) {
    const PoolPart& part = state_->pools[size_t(p)];
    if (!part.size) continue;
    const auto m = Matrix(matrix);
    const bool down = m == kDown;
    unpack_matrix(part.layout[m], state_->expert(p, slot) + part.begin_of(m), part.stride_of(m),
                  dst + (down ? part.begin : part.begin * c.hidden_size),
                  down ? c.intermediate_size : c.hidden_size);
  }
  const int64_t position = state_->position[size_t(slot)];
  if (matrix == kDown || !state_->order.present[size_t(position)]) return;
  const int32_t* order = state_->order.row(position, Matrix(matrix));
  std::vector<float> row(size_t(c.hidden_size));
  for (int64_t i = 0; i < c.intermediate_size; ++i, dst += c.hidden_size) {
    for (int64_t k = 0; k < c.hidden_size; ++k) row[size_t(order[k])] = dst[k];
    std::copy(row.begin(), row.end(), dst);
  }
}

int64_t MoeLayer::packed_bytes() const {
  int64_t total = 0;
  for (const PoolPart& part : state_->pools) total += int64_t(part.memory.size());
  return total;
}

}  // namespace kt
