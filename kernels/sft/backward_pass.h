// One worker's view of a backward pass: the phases, and what they share.
#pragma once
#include "backward.h"
#include "pass.h"

namespace kt {

// For a route (token t, expert e, router weight w) with the output's gradient dO, and s = scaling:
//   v  = W_down^T dO + s * mask * A_down^T (B_down^T dO)      gradient of h, without w
//   grad_weights = <v, h> + <dO, bias_down>
//   dg, du = SwiGLU's gradients for w * v
//   dx += W^T d + s * mask * A^T (B^T d)                      over gate and up
//   dA = (s * B^T d)^T (mask * x), dB = d^T (s * (mask * x) A^T), with w * dO for d of down
// where mask is that of the forward pass, and roundings of activations count as if there were none.
// Phases of a chunk:
//   rows      dO as rows; s * B_down^T dO
//   again     s * (mask * x) A^T of gate and up, then gate and up, unless forward kept them
//   inter     by columns of I: v, h, dg, du; gradients of A_down, B_gate and B_up
//   ranks     s * B^T d of gate and up, s * (mask * h) A_down^T, by pool
//   by row    the same summed over pools; gradients of router weights
//   input     by columns of H: dx, summed over the experts of a group, then over groups and pools
//   hidden    by columns of H: gradients of A_gate, A_up and B_down, and of the weights
// A gradient is the sum over the rows of an expert in ascending order, by one thread, then over
// chunks.
class BackwardPass : TrainingPass {
 public:
  BackwardPass(TrainingState& state, const TrainingBackwardArgs& args, SavedForward& saved,
               sys::Worker& worker);
  void run();

 private:
  void chunk();
  void clear_gradients();
  void take_rows();
  void take_grad_out(const ExpertRows& e, int64_t begin, int64_t end);
  void gate_up_again();
  // backward_inter.cpp
  void inter();
  void inter_columns(const ExpertRows& e, int64_t block);
  void inter_tile(const ExpertRows& e, int64_t tile, int64_t first, int64_t m, const float* v,
                  float* sums);
  void inter_sums(const ExpertRows& e, int64_t tile, const float* sums);
  void ranks();
  void by_row();
  void sum_ranks(const ExpertRows& e, int64_t row);
  void route_gradient(const ExpertRows& e, int64_t row);
  // backward_hidden.cpp
  void input();
  void input_columns(const ExpertRows& e, int64_t block, int64_t group);
  void input_sum(const ExpertRows& e, int64_t block);
  const float* input_adapters(const ExpertRows& e, int64_t tile, int64_t first, int64_t m,
                              float* to);
  bool keeps_input() const { return keeps_pairs() || layer_.order.any; }
  void ordered_input();
  void hidden();
  void take_columns(const uint16_t* rows, const ExpertRows& e, int64_t tile, const float* factor,
                    float* to) const;
  void adapter_gradients(const ExpertRows& e, int64_t tile);
  void weight_gradients(const ExpertRows& e, int64_t tile);

  // Pairs before those of the present plan, where gate and up of all are kept.
  int64_t pairs_before() const { return state_.config.recompute ? 0 : first_ * config_.top_k; }
  uint16_t* gate_up_memory() const {
    return as<uint16_t>(state_.config.recompute ? pool_space().gate_up
                                                : saved_.gate_up[size_t(worker_.pool)]);
  }
  // Of float32 tiles of all rows of an expert.
  float* full_tile(int pool, Matrix m, const ExpertRows& e, int64_t tiles, int64_t tile) const {
    return as<float>(space_.pool[size_t(pool)].full[m]) +
           (e.first * tiles + e.count * tile) * kTileRows;
  }
  float* dots(int pool, int64_t tile) const {
    return as<float>(space_.pool[size_t(pool)].dots) + tile * space_.size.pairs;
  }
  BF16Rows grad_out_rows() const { return rows_in(space_.grad_out, config_.hidden_size); }
  BF16Rows grad_rows(Matrix m) const { return rows_in(pool_space().grad[m], part().size); }
  // A of the transposed products with rows from `first` on, a multiple of 32: `rows`, or what
  // TurnedKernels::rows made of them in `turned`.
  ActRows operand(const BF16Rows& rows, const sys::Mapping& turned, const ExpertRows& e,
                  int64_t first) const {
    if (!training_.turned) return rows.from(row(e) + first);
    return rows_in(turned, rows.columns).from(turned_row(e) + first);
  }
  ActRows grad_out_operand(const ExpertRows& e, int64_t first) const {
    return operand(grad_out_rows(), space_.turned_out, e, first);
  }
  ActRows grad_operand(const ExpertRows& e, Matrix m, int64_t first) const {
    return operand(grad_rows(m), pool_space().turned[m], e, first);
  }
  // Makes a tile of values of rows [first, first + m) such an operand: `valid` of 32 columns.
  void keep_operand(const BF16Rows& rows, const sys::Mapping& turned, const ExpertRows& e,
                    int64_t tile, int64_t first, int64_t m, const float* values,
                    int64_t valid) const;
  // Whether a transposed product with base weights and those of the adapters are one sum.
  // Otherwise dropout, or the order of columns, comes between them.
  bool sums_terms() const { return training_.turned && !in_.dropout && !layer_.order.any; }
  // A term for TurnedKernels::sum with 64 columns of a matrix, or of an adapter's A, whose
  // transpose goes to `scratch` and moves it on.
  TurnedTerm base_term(const ExpertRows& e, Matrix m, int64_t block, const ActRows& rows,
                       uint8_t*& scratch) const;
  TurnedTerm adapter_term(const ExpertRows& e, Matrix m, int64_t block, uint8_t*& scratch) const;
  const float* a_product(const ExpertRows& e, Matrix m, int64_t tile, int64_t first, int64_t rows,
                         float* to);
  // f(first, rows, tile, values) with tiles of values of rows [begin, end) times B of an adapter,
  // for the block of 64 numbers of the rank; rows_of(first) are those rows.
  template <class R, class F>
  void b_products(const ExpertRows& e, Matrix m, int64_t block, int64_t begin, int64_t end,
                  R rows_of, F f) const;
  int64_t rank_blocks() const { return ceil_div(rank_tiles(), 2); }

  const TrainingBackwardArgs args_;
  SavedForward& saved_;
  const bool adapters_;  // whether their terms and gradients are wanted
  const bool full_;      // whether the gradients of the weights are
};

template <class R, class F>
void BackwardPass::b_products(const ExpertRows& e, Matrix m, int64_t block, int64_t begin,
                              int64_t end, R rows_of, F f) const {
  float* values = mine_.tile[0];  // and tile[1]
  const MatrixLayout& layout = lora_.layout(m, kLoraB, worker_.pool);
  row_blocks(begin, end, [&](int64_t r, int64_t n) {
    if (training_.turned)
      training_.transposed[int(WeightFormat::kBF16)](
          lora_.tiles(m, kLoraB, worker_.pool, e.slot), layout.tile_bytes(), layout,
          block * kTransposedColumns, rows_of(r), n, mine_.transposed, values,
          mine_.tile[1] - values);
    for (int64_t tile = 2 * block; tile < std::min(2 * block + 2, rank_tiles()); ++tile) {
      if (!training_.turned)
        adapter_product(m, kLoraBt, e.slot, tile, rows_of(r), n, mine_.tile[tile % 2]);
      f(r, n, tile, mine_.tile[tile % 2]);
    }
  });
}

// dst[i * stride + c] += values[i * 32 + c] for i < rows and c < columns.
inline void add_block(const float* values, int64_t rows, int64_t columns, float* dst,
                      int64_t stride) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < columns; ++c) dst[i * stride + c] += values[i * kTileRows + c];
}

// dst[c * rows + i] += the same.
inline void add_transposed(const float* values, int64_t rows, int64_t columns, float* dst) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < columns; ++c) dst[c * rows + i] += values[i * kTileRows + c];
}

}  // namespace kt
