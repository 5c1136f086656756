#include "layer.h"

#include <algorithm>
#include <stdexcept>

#include "../pack/pack.h"
#include "forward.h"
#include "pack_job.h"

namespace kt {
namespace {

MatrixLayout layout_of(const LayerConfig& c, int64_t rows, int64_t cols) {
  return {c.format, rows, cols, c.group, c.scale};
}

// Splits I into one contiguous part per pool, in units that no group or tile crosses, in
// proportion to the pools' threads.
std::vector<PoolPart> split_pools(const sys::Team& team, const LayerConfig& c, int64_t held) {
  const int64_t unit = layout_of(c, 1, 1).split_unit();
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
    part.up = layout_of(c, part.size, c.hidden_size);
    part.down = layout_of(c, c.hidden_size, part.size);
    part.memory = sys::Mapping(part.size ? size_t(held * part.expert_bytes()) : 0, team.node(p));
    parts.push_back(std::move(part));
  }
  return parts;
}

void need(bool good, const std::string& what) {
  if (!good) throw std::invalid_argument(what);
}

void check(const sys::Team& team, const LayerConfig& c) {
  need(team.pools() <= kMaxPools, std::to_string(team.pools()) + " pools; at most " +
                                      std::to_string(kMaxPools) + " are supported");
  need(int(c.format) >= 0 && int(c.format) < kFormatCount,
       "unknown weight format " + std::to_string(int(c.format)));
  need(c.num_experts >= 1 && c.top_k >= 1 && c.max_tokens >= 1,
       "num_experts, top_k and max_tokens must be positive");
  for (int64_t size : {c.hidden_size, c.intermediate_size})
    need(size >= 1 && size <= kMaxColumns, "hidden or intermediate size " + std::to_string(size) +
                                               "; 1 to " + std::to_string(kMaxColumns) +
                                               " is accepted");
  const MatrixLayout any = layout_of(c, 1, 1);
  if (any.has_group())
    need(c.group >= 32 && c.group % 32 == 0,
         "group size " + std::to_string(c.group) + " must be a multiple of 32");
  else
    need(c.group == 0, "this weight format has no groups");
  need(int(c.scale) >= 0 && int(c.scale) <= int(ScaleType::kFP32),
       "unknown scale type " + std::to_string(int(c.scale)));
  for (int64_t size : {c.hidden_size, c.intermediate_size})
    need(size % any.column_unit() == 0, "hidden or intermediate size " + std::to_string(size) +
                                            "; this weight format needs a "
                                            "multiple of " +
                                            std::to_string(any.column_unit()));
  need(int64_t(c.on_cpu.size()) == c.num_experts, "on_cpu needs one entry per expert");
  const LayerTuning& t = c.tuning;
  need(t.gemm_min_rows >= 0 && t.task_bytes >= 0, "gemm_min_rows and task_bytes: 0 or more");
  need(t.row_block >= 0 && t.row_block <= kRowBlock && t.row_block % 32 == 0,
       "row_block " + std::to_string(t.row_block) + "; multiples of 32 up to " +
           std::to_string(kRowBlock) + " are accepted");
}

// Tasks of a chunk are numbered (kernels/sys/task_queue.h).
void check_tasks(const LayerConfig& c) {
  const int64_t pairs = c.max_tokens * c.top_k;
  const int64_t tiles = ceil_div(std::max(c.hidden_size, c.intermediate_size), kTileRows);
  need(pairs <= sys::kMaxTasks &&
           std::min(pairs, c.num_experts + pairs / kItemRows) <= sys::kMaxTasks / tiles,
       "max_tokens " + std::to_string(c.max_tokens) + ": more than " +
           std::to_string(sys::kMaxTasks) + " tasks; a lower one is accepted");
}

}  // namespace

MoeLayer::MoeLayer(std::shared_ptr<sys::Team> team, LayerConfig config)
    : team_(std::move(team)), state_(std::make_shared<LayerState>(team_->threads())) {
  check(*team_, config);
  LayerState& s = *state_;
  s.config = std::move(config);
  const LayerConfig& c = s.config;
  for (uint8_t here : c.on_cpu) s.position.push_back(here ? s.held++ : -1);
  s.pools = split_pools(*team_, c, s.held);
  const auto size_bias = [&](BiasTable& table, int64_t width) {
    table.width = width;
    table.memory = sys::Mapping(size_t(s.held * round_up(width, kTileRows)) * sizeof(float));
  };
  size_bias(s.gate_bias, c.intermediate_size);
  size_bias(s.up_bias, c.intermediate_size);
  size_bias(s.down_bias, c.hidden_size);
  s.workspace = workspace_for(
      team_, {c.max_tokens, c.top_k, c.num_experts, c.hidden_size, c.intermediate_size});
  check_tasks(c);
}

void MoeLayer::need_slot(int64_t slot) const {
  need(slot >= 0 && slot < config().num_experts && state_->position[size_t(slot)] >= 0,
       "expert slot " + std::to_string(slot) + " is not held on the CPU");
}

void MoeLayer::load_expert(int64_t slot, const ExpertSource& source) {
  need_slot(slot);
  auto job = std::make_shared<PackJob>(state_, slot, source, team_->threads());
  team_->submit(job);
  job->wait();
  if (const std::string problem = job->problem(); !problem.empty())
    throw std::invalid_argument("expert slot " + std::to_string(slot) + ", " + problem);
}

std::shared_ptr<sys::Job> MoeLayer::submit(const ForwardArgs& args) {
  need(args.tokens >= 0 && (args.tokens == 0 || args.out || args.partial),
       "a forward pass needs an output");
  auto job = std::make_shared<ForwardJob>(state_, args);
  team_->submit(job);
  return job;
}

void MoeLayer::unpack(int64_t slot, int matrix, float* dst) const {
  need_slot(slot);
  need(matrix >= 0 && matrix <= 2, "matrix " + std::to_string(matrix) + "; 0 to 2 is accepted");
  const LayerConfig& c = config();
  for (int p = 0; p < team_->pools(); ++p) {
    const PoolPart& part = state_->pools[size_t(p)];
    if (!part.size) continue;
    const uint8_t* base = state_->expert(p, slot);
    if (matrix < 2)
      unpack_matrix(part.up, base + matrix * part.up.tile_bytes(), 2 * part.up.tile_bytes(),
                    dst + part.begin * c.hidden_size, c.hidden_size);
    else
      unpack_matrix(part.down, base + 2 * part.up.bytes(), part.down.tile_bytes(), dst + part.begin,
                    c.intermediate_size);
  }
}

int64_t MoeLayer::packed_bytes() const {
  int64_t total = 0;
  for (const PoolPart& part : state_->pools) total += int64_t(part.memory.size());
  return total;
}

}  // namespace kt
