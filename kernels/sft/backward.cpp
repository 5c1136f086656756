#include "backward.h"

#include <algorithm>
#include <utility>

#include "backward_pass.h"

namespace kt {

BackwardPass::BackwardPass(TrainingState& state, const TrainingBackwardArgs& args,
                           SavedForward& saved, sys::Worker& worker)
    : TrainingPass(
          state, worker,
          {as<uint16_t>(saved.x), saved.ids.data(), saved.weights.data(), saved.tokens, saved.seed,
           saved.drop && state.config.dropout > 0, saved.on_cpu, state.config.recompute}),
      args_(args),
      saved_(saved),
      adapters_(!state.config.skip_lora_grads),
      full_(state.config.full_weight_grad) {}

void BackwardPass::run() {
  clear_gradients();  // before the first barrier
  each_chunk([this] { chunk(); });
}

void BackwardPass::chunk() {
  take_rows();
  if (state_.config.recompute) gate_up_again();
  inter();
  if (adapters_) ranks();
  by_row();
  input();
  if (adapters_ || full_) hidden();
}

// Each thread a part.
void BackwardPass::clear_gradients() {
  const LayerConfig& c = config_;
  const auto clear = [&](float* values, int64_t n) {
    const int64_t begin = n * worker_.rank / worker_.team_threads;
    if (values)
      std::fill(values + begin, values + n * (worker_.rank + 1) / worker_.team_threads, 0.0f);
  };
  map_pages(args_.grad_in, in_.tokens * c.hidden_size);
  clear(args_.grad_weights, in_.tokens * c.top_k);
  for (int m = 0; m < kMatrices; ++m) {
    const int64_t in = m == kDown ? c.intermediate_size : c.hidden_size;
    const int64_t out = m == kDown ? c.hidden_size : c.intermediate_size;
    clear(args_.grads.a[m], c.num_experts * lora_.rank() * in);
    clear(args_.grads.b[m], c.num_experts * lora_.rank() * out);
    clear(args_.grads.weight[m], c.num_experts * in * out);
  }
  // Also where there are no tokens, and so no chunk.
  worker_.team_barrier();
}

void BackwardPass::take_grad_out(const ExpertRows& e, int64_t begin, int64_t end) {
  const int64_t h = config_.hidden_size;
  note_pairs(e, begin, end);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t token = first_ + plan().tokens()[e.first + r];
    if (!training_.turned)
      grad_out_rows().put_row(table_, row(e) + r, args_.grad_out + token * h, DType::kBF16, h);
    for (Matrix matrix : {kGate, kUp}) {
      if (!adapters_ || state_.config.recompute) continue;
      std::copy_n(kept_ranks(as<float>(saved_.ranks), e, r, matrix), lora_.rank(),
                  rank_values(matrix, e) + r * lora_.rank_padded());
    }
  }
  const int64_t bytes = grad_out_rows().columns * 2;
  for (int64_t r = begin; training_.turned && r < end; r += kTileRows)
    training_.turned->rows(args_.grad_out + first_ * h, h, plan().tokens() + e.first + r,
                           std::min(kTileRows, end - r), h,
                           space_.turned_out.data() + (turned_row(e) + r) * bytes);
}

void BackwardPass::take_rows() {
  if (state_.config.recompute) take_x(nullptr);
  const int64_t padded = lora_.rank_padded();
  each_part([&](const ExpertRows& e, int64_t begin, int64_t end) {
    take_grad_out(e, begin, end);
    if (!adapters_) return;
    const auto rows = [&](int64_t r) { return grad_out_operand(e, r); };
    const auto keep = [&](int64_t r, int64_t m, int64_t tile, float* values) {
      for (int64_t i = 0; i < m; ++i) {
        float* one = values + i * kTileRows;
        for (int64_t n = 0; n < kTileRows; ++n) one[n] *= state_.config.scaling;
        const float weight = plan().weights()[e.first + r + i];
        float* weighted = rank_values(kDown, e) + (r + i) * padded + tile * kTileRows;
        for (int64_t n = 0; n < kTileRows; ++n) weighted[n] = weight * one[n];
      }
      keep_operand(rank_rows(kDown), space_.turned_ranks[kDown], e, tile, r, m, values, kTileRows);
    };
    for (int64_t block = 0; block < rank_blocks(); ++block)
      b_products(e, kDown, block, begin, end, rows, keep);
  });
}

void BackwardPass::keep_operand(const BF16Rows& to, const sys::Mapping& memory, const ExpertRows& e,
                                int64_t tile, int64_t first, int64_t m, const float* values,
                                int64_t valid) const {
  if (!training_.turned) return to.put_tile(table_, row(e) + first, tile, values, m, valid);
  alignas(64) uint16_t rounded[kTileRows * kTileRows];
  const int64_t bytes = to.columns * 2;
  uint8_t* turned = memory.data() + (turned_row(e) + first) * bytes + tile * sizeof rounded;
  for (int64_t r = 0; r < m; r += kTileRows, values += kTileRows * kTileRows) {
    const int64_t n = std::min(kTileRows, m - r);
    table_.quantise[int(ActKind::kBF16)](values, DType::kFP32, n * kTileRows, n * kTileRows, -1,
                                         reinterpret_cast<uint8_t*>(rounded), nullptr, nullptr);
    training_.turned->rows(rounded, kTileRows, nullptr, n, valid, turned + r * bytes);
  }
}

TurnedTerm BackwardPass::base_term(const ExpertRows& e, Matrix m, int64_t block,
                                   const ActRows& rows, uint8_t*& scratch) const {
  const MatrixLayout& layout = part().layout[m];
  const uint8_t* tiles = layer_.expert(worker_.pool, e.slot) + part().begin_of(m);
  uint8_t* to = scratch;
  training_.turned->weights[int(layout.format)](tiles, part().stride_of(m), layout,
                                                block * kTransposedColumns, to);
  scratch += transposed_scratch(layout.rows);
  return {to, rows.data, layout.tiles()};
}

TurnedTerm BackwardPass::adapter_term(const ExpertRows& e, Matrix m, int64_t block,
                                      uint8_t*& scratch) const {
  const MatrixLayout& layout = lora_.layout(m, kLoraA, worker_.pool);
  uint8_t* to = scratch;
  training_.turned->weights[int(WeightFormat::kBF16)](lora_.tiles(m, kLoraA, worker_.pool, e.slot),
                                                      layout.tile_bytes(), layout,
                                                      block * kTransposedColumns, to);
  scratch += transposed_scratch(layout.rows);
  return {to, operand(rank_rows(m), space_.turned_ranks[m], e, 0).data, layout.tiles()};
}

// A tile of the rank's values times A of an adapter, with the forward pass's dropout.
const float* BackwardPass::a_product(const ExpertRows& e, Matrix m, int64_t tile, int64_t first,
                                     int64_t rows, float* to) {
  if (training_.turned) {
    // After what the caller may have there, the transpose of 64 columns of down.
    uint8_t* scratch = mine_.transposed + transposed_scratch(config_.hidden_size);
    const TurnedTerm term = adapter_term(e, m, tile / 2, scratch);
    const int64_t columns = std::min(
        lora_.layout(m, kLoraA, worker_.pool).cols_padded() - tile / 2 * kTransposedColumns,
        kTransposedColumns);
    float* values = mine_.tile[6];  // and tile[7]
    training_.turned->sum(&term, 1, columns, first, rows, values, mine_.tile[7] - values);
    to = mine_.tile[6 + tile % 2];
  } else {
    adapter_product(m, kLoraAt, e.slot, tile, rank_rows(m).from(row(e) + first), rows, to);
  }
  drop_tile(m, e, first, rows, (m == kDown ? part().begin : 0) + tile * kTileRows, to);
  return to;
}

void BackwardPass::gate_up_again() {
  gate_up([&](const ExpertRows& e, int64_t tile, int64_t first, int64_t m, float* gate, float* up) {
    keep_gate_up(gate_up_memory(), pairs_before(), e, tile, first, m, gate, up);
  });
}

TrainingBackwardJob::TrainingBackwardJob(std::shared_ptr<TrainingState> state,
                                         const TrainingBackwardArgs& args,
                                         std::shared_ptr<SavedForward> saved)
    : state_(std::move(state)), args_(args), saved_(std::move(saved)) {
  state_->layer->workspace->renew_after_fork();
}

void TrainingBackwardJob::run(sys::Worker& worker) noexcept {
  BackwardPass(*state_, args_, *saved_, worker).run();
}

}  // namespace kt
