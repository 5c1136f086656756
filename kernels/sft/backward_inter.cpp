// The phases of a backward pass that go by columns of I, and what comes of them.
#include <algorithm>

#include "backward_pass.h"

namespace kt {
namespace {

// Where the sums of outer products of a tile of I lie, of [rank][32] each.
constexpr int64_t kSums = 3;  // A of down; transposed: B of gate, B of up

}  // namespace

void BackwardPass::inter() {
  const int64_t blocks = ceil_div(inter_tiles(), 2);
  const auto cost = [&](int64_t i) { return std::max<int64_t>(plan().expert(i).count, 32); };
  pool_phase(plan().active(), blocks, cost,
             [&](int64_t i, int64_t block) { inter_columns(plan().expert(i), block); });
}

// All rows of an expert, 64 columns of I.
void BackwardPass::inter_columns(const ExpertRows& e, int64_t block) {
  const int64_t first_tile = 2 * block, tiles = std::min<int64_t>(inter_tiles() - first_tile, 2);
  const int64_t sums = kSums * lora_.rank_padded() * kTileRows;
  std::fill_n(mine_.sums, tiles * sums, 0.0f);
  float* v = mine_.tile[0];  // and tile[1]
  const auto rest = [&](int64_t r, int64_t m) {
    for (int64_t t = 0; t < tiles; ++t) {
      float* values = mine_.tile[t];
      if (adapters_ && !sums_terms())
        training_.add(values, a_product(e, kDown, first_tile + t, r, m, mine_.tile[2]), nullptr, m);
      near_rows(m, [&](int64_t at, int64_t n) {
        inter_tile(e, first_tile + t, r + at, n, values + at * kTileRows, mine_.sums + t * sums);
      });
    }
  };
  if (training_.turned) {
    uint8_t* scratch = mine_.transposed;
    TurnedTerm terms[2] = {base_term(e, kDown, block, grad_out_operand(e, 0), scratch)};
    const bool both = adapters_ && sums_terms();
    if (both) terms[1] = adapter_term(e, kDown, block, scratch);
    row_blocks(0, e.count, [&](int64_t r, int64_t m) {
      training_.turned->sum(terms, both ? 2 : 1, tiles * kTileRows, r, m, v, mine_.tile[1] - v);
      rest(r, m);
    });
  } else {
    const MatrixLayout& layout = part().layout[kDown];
    const uint8_t* weights = layer_.expert(worker_.pool, e.slot) + part().begin_of(kDown);
    row_blocks(0, e.count, [&](int64_t r, int64_t m) {
      training_.transposed[int(layout.format)](weights, layout.tile_bytes(), layout,
                                               block * kTransposedColumns, grad_out_operand(e, r),
                                               m, mine_.transposed, v, mine_.tile[1] - v);
      rest(r, m);
    });
  }
  for (int64_t t = 0; t < tiles && adapters_; ++t)
    inter_sums(e, first_tile + t, mine_.sums + t * sums);
}

// Rows [first, first + m) of the expert; v: W_down^T dO, with the adapter's part.
void BackwardPass::inter_tile(const ExpertRows& e, int64_t tile, int64_t first, int64_t m,
                              const float* v, float* sums) {
  float* h = mine_.tile[3];
  ByMatrix<float*> d{mine_.tile[4], mine_.tile[5], h};
  const int64_t at = row(e) + first, column = part().begin + tile * kTileRows;
  const auto kept = [&](int half) {
    return gate_up_memory() + saved_tile(pairs_before(), e, inter_tiles(), tile, half) +
           first * kTileRows;
  };
  training_.swiglu_backward(kept(0), kept(1), v, plan().weights() + e.first + first,
                            config_.activation, m,
                            {h, d[kGate], d[kUp], dots(worker_.pool, tile) + e.first + first});
  for (Matrix matrix : {kGate, kUp})
    keep_operand(grad_rows(matrix), pool_space().turned[matrix], e, tile, first, m, d[matrix],
                 valid_inter(tile));
  for (int matrix = 0; full_ && matrix < kMatrices; ++matrix)
    std::copy_n(
        d[matrix], m * kTileRows,
        full_tile(worker_.pool, Matrix(matrix), e, inter_tiles(), tile) + first * kTileRows);
  if (!adapters_) return;
  drop_tile(kDown, e, first, m, column, h);
  const BF16Rows to = rows_in(pool_space().h, part().size);
  to.put_tile(table_, at, tile, h, m, valid_inter(tile));
  const int64_t padded = lora_.rank_padded(), size = padded * kTileRows;
  const auto ranks = [&](Matrix matrix) { return rank_values(matrix, e) + first * padded; };
  training_.outer(ranks(kDown), padded, lora_.rank(), h, kTileRows, m, sums);
  for (Matrix matrix : {kGate, kUp})
    training_.outer(ranks(matrix), padded, lora_.rank(), d[matrix], kTileRows, m,
                    sums + (1 + matrix) * size);
}

// Adds the sums of a tile of I to the gradients.
void BackwardPass::inter_sums(const ExpertRows& e, int64_t tile, const float* sums) {
  const int64_t rank = lora_.rank(), inter = config_.intermediate_size;
  const int64_t column = part().begin + tile * kTileRows, valid = valid_inter(tile);
  add_block(sums, rank, valid, args_.grads.a[kDown] + e.slot * rank * inter + column, inter);
  for (Matrix m : {kGate, kUp}) {
    sums += lora_.rank_padded() * kTileRows;
    add_transposed(sums, rank, valid, args_.grads.b[m] + (e.slot * inter + column) * rank);
  }
}

// s * B^T d of gate and up, and w * s * (mask * h) A_down^T.
void BackwardPass::ranks() {
  const int64_t tiles = rank_tiles(), each = part().size ? tiles + 2 * rank_blocks() : 0;
  const auto cost = [&](int64_t item) { return plan().item(item).rows(); };
  pool_phase(plan().items(), each, cost, [&](int64_t number, int64_t task) {
    const WorkItem& item = plan().item(number);
    const ExpertRows& e = plan().expert(item.expert);
    if (task < tiles)
      return rank_of_h(item, task, rows_in(pool_space().h, part().size).from(row(e)));
    const Matrix m = (task - tiles) % 2 ? kUp : kGate;
    b_products(
        e, m, (task - tiles) / 2, item.first, item.last,
        [&](int64_t r) { return grad_operand(e, m, r); },
        [&](int64_t r, int64_t n, int64_t tile, const float* values) {
          keep_rank_part(e, m, r, n, tile, values);
        });
  });
}

// What comes of the sums over I.
void BackwardPass::by_row() {
  each_part([&](const ExpertRows& e, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (adapters_) sum_ranks(e, r);
      route_gradient(e, r);
    }
    for (Matrix m : {kGate, kUp})
      for (int64_t tile = 0; adapters_ && tile < rank_tiles(); ++tile) {
        const float* from = rank_values(m, e) + begin * lora_.rank_padded() + tile * kTileRows;
        float* values = mine_.tile[0];
        for (int64_t i = 0; i < end - begin; ++i, from += lora_.rank_padded())
          std::copy_n(from, kTileRows, values + i * kTileRows);
        keep_operand(rank_rows(m), space_.turned_ranks[m], e, tile, begin, end - begin, values,
                     kTileRows);
      }
  });
}

// Sums over the pools.
void BackwardPass::sum_ranks(const ExpertRows& e, int64_t row) {
  const int64_t padded = lora_.rank_padded();
  const float weight = plan().weights()[e.first + row];
  for (Matrix m : {kGate, kUp, kDown}) {
    float* sum = rank_values(m, e) + row * padded;
    sum_rank_parts(m, e, row, sum);
    for (int64_t i = 0; m == kDown && i < padded; ++i) sum[i] *= weight;
  }
}

// Of a router weight.
void BackwardPass::route_gradient(const ExpertRows& e, int64_t row) {
  const int64_t h = config_.hidden_size, pair = e.first + row;
  float sum = 0;
  for (int p = 0; p < int(layer_.pools.size()); ++p) {
    const PoolPart& part = layer_.pools[size_t(p)];
    for (int64_t t = 0; part.size && t < part.layout[kUp].tiles(); ++t) sum += dots(p, t)[pair];
  }
  if (const float* bias = layer_.bias_of(kDown, e.slot)) {
    table_.quantise[int(ActKind::kFloat)](args_.grad_out + (first_ + plan().tokens()[pair]) * h,
                                          DType::kBF16, h, round_up(h, kTileRows), -1,
                                          reinterpret_cast<uint8_t*>(mine_.row), nullptr, nullptr);
    for (int64_t i = 0; i < h; ++i) sum += mine_.row[i] * bias[i];
  }
  args_.grad_weights[first_ * config_.top_k + plan().routes()[pair]] = sum;
}

}  // namespace kt
