// The phases of a backward pass that go by columns of H.
#include <algorithm>

#include "backward_pass.h"

namespace kt {

// The gradient of x. The products are also kept by pair where the columns of an expert's matrices
// have orders of their own (act-order), because a column of the sum then takes from columns all
// over the rows.
void BackwardPass::input() {
  const int64_t blocks = part().size ? ceil_div(hidden_tiles(), 2) : 0;
  const int64_t groups = plan().groups();
  if (keeps_input()) {
    const auto cost = [&](int64_t i) { return std::max<int64_t>(plan().expert(i).count, 32); };
    pool_phase(plan().active(), blocks, cost,
               [&](int64_t i, int64_t block) { input_columns(plan().expert(i), block, 0); });
    if (!layer_.order.any) return add_pairs(false, args_.grad_in);
    ordered_input();
  } else {
    const auto cost = [&](int64_t i) { return plan().group(i % groups).pairs; };
    pool_phase(blocks * groups, 1, cost, [&](int64_t i, int64_t) {
      const int64_t block = i / groups, group = i % groups;
      for (int64_t tile = 2 * block; tile < std::min(2 * block + 2, hidden_tiles()); ++tile)
        std::fill_n(sum_of(worker_.pool, group, tile), count_ * kTileRows, 0.0f);
      for (int64_t n = plan().group(group).first; n < plan().group(group).last; ++n)
        input_columns(plan().expert(n), block, group);
    });
  }
  finish_sums(args_.grad_in);
}

// 64 columns of W^T d of gate and up, with the adapters' part: added to the group's sums, or kept
// by pair. Where columns have orders, each matrix is kept by itself, without adapters.
void BackwardPass::input_columns(const ExpertRows& e, int64_t block, int64_t group) {
  if (sums_terms()) return input_sum(e, block);
  const uint8_t* weights = layer_.expert(worker_.pool, e.slot);
  const int64_t first_tile = 2 * block, tiles = std::min<int64_t>(hidden_tiles() - first_tile, 2);
  const int64_t tile_floats = mine_.tile[1] - mine_.tile[0];
  row_blocks(0, e.count, [&](int64_t r, int64_t m) {
    for (Matrix matrix : {kGate, kUp}) {
      const MatrixLayout& layout = part().layout[matrix];
      training_.transposed[int(layout.format)](
          weights + part().begin_of(matrix), part().stride_of(matrix), layout,
          block * kTransposedColumns, grad_operand(e, matrix, r), m, mine_.transposed,
          mine_.tile[2 * matrix], tile_floats);
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t tile = first_tile + t, pair = e.first + r;
      float *gate = mine_.tile[t], *up = mine_.tile[2 + t];
      if (layer_.order.any) {
        keep_by_pair(kGate, pair, m, tile, gate, nullptr);
        keep_by_pair(kUp, pair, m, tile, up, nullptr);
        continue;
      }
      const float* more = up;
      if (adapters_ && first_part()) {
        training_.add(gate, up, nullptr, m);
        more = input_adapters(e, tile, r, m, gate);
      }
      if (keeps_input()) {
        keep_by_pair(kGate, pair, m, tile, gate, more);
        continue;
      }
      training_.add(gate, more, nullptr, m);
      table_.merge(gate, nullptr, space_.ones.data(), plan().tokens() + pair, m,
                   sum_of(worker_.pool, group, tile));
    }
  });
}

// The same as one sum of products, kept by pair.
void BackwardPass::input_sum(const ExpertRows& e, int64_t block) {
  const int64_t first_tile = 2 * block, tiles = std::min<int64_t>(hidden_tiles() - first_tile, 2);
  uint8_t* scratch = mine_.transposed;
  TurnedTerm terms[4];
  int count = 0;
  for (Matrix matrix : {kGate, kUp})
    terms[count++] = base_term(e, matrix, block, grad_operand(e, matrix, 0), scratch);
  for (Matrix matrix : {kGate, kUp})
    if (adapters_ && first_part()) terms[count++] = adapter_term(e, matrix, block, scratch);
  row_blocks(0, e.count, [&](int64_t r, int64_t m) {
    training_.turned->sum(terms, count, tiles * kTileRows, r, m, mine_.tile[0],
                          mine_.tile[1] - mine_.tile[0]);
    for (int64_t t = 0; t < tiles; ++t)
      keep_by_pair(kGate, e.first + r, m, first_tile + t, mine_.tile[t], nullptr);
  });
}

// Adds the adapters' part of a tile of the gradient of x, except for the values that it returns.
const float* BackwardPass::input_adapters(const ExpertRows& e, int64_t tile, int64_t first,
                                          int64_t m, float* to) {
  training_.add(to, a_product(e, kGate, tile, first, m, mine_.tile[4]), nullptr, m);
  return a_product(e, kUp, tile, first, m, mine_.tile[4]);
}

// The sums over the experts of a group, from what was kept by pair.
void BackwardPass::ordered_input() {
  const int64_t h = config_.hidden_size, groups = plan().groups();
  const int64_t tiles = part().size ? hidden_tiles() : 0;
  const auto cost = [&](int64_t i) { return plan().group(i % groups).pairs; };
  pool_phase(tiles * groups, 1, cost, [&](int64_t i, int64_t) {
    const int64_t tile = i / groups, group = i % groups, valid = valid_hidden(tile);
    float* sum = sum_of(worker_.pool, group, tile);
    std::fill_n(sum, count_ * kTileRows, 0.0f);
    for (int64_t n = plan().group(group).first; n < plan().group(group).last; ++n) {
      const ExpertRows& e = plan().expert(n);
      const int64_t position = layer_.position[size_t(e.slot)];
      row_blocks(0, e.count, [&](int64_t r, int64_t m) {
        float* values = mine_.tile[0];
        std::fill_n(values, m * kTileRows, 0.0f);
        for (Matrix matrix : {kGate, kUp}) {
          const int32_t* from =
              saved_.inverse_order.data() + (2 * position + matrix) * h + tile * kTileRows;
          for (int64_t row = 0; row < m; ++row) {
            const float* kept = by_pair(worker_.pool, matrix, e.first + r + row);
            for (int64_t c = 0; c < valid; ++c) values[row * kTileRows + c] += kept[from[c]];
          }
        }
        if (adapters_ && first_part())
          training_.add(values, input_adapters(e, tile, r, m, values), nullptr, m);
        table_.merge(values, nullptr, space_.ones.data(), plan().tokens() + e.first + r, m, sum);
      });
    }
  });
}

void BackwardPass::hidden() {
  const auto cost = [&](int64_t i) { return std::max<int64_t>(plan().expert(i).count, 8); };
  team_phase(plan().active(), hidden_tiles(), cost, [&](int64_t i, int64_t tile) {
    const ExpertRows& e = plan().expert(i);
    if (adapters_) adapter_gradients(e, tile);
    if (full_) weight_gradients(e, tile);
  });
}

// 32 columns of the rows of an expert, of x or of the output's gradient.
void BackwardPass::take_columns(const uint16_t* rows, const ExpertRows& e, int64_t tile,
                                const float* factor, float* to) const {
  const int64_t h = config_.hidden_size;
  training_.columns(rows + first_ * h + tile * kTileRows, h, plan().tokens() + e.first, factor,
                    e.count, valid_hidden(tile), to);
}

void BackwardPass::adapter_gradients(const ExpertRows& e, int64_t tile) {
  const int64_t rank = lora_.rank(), h = config_.hidden_size, valid = valid_hidden(tile);
  float* columns = mine_.columns[0];
  const auto sum = [&](Matrix m) {
    std::fill_n(mine_.sums, rank * kTileRows, 0.0f);
    training_.outer(rank_values(m, e), lora_.rank_padded(), rank, columns, kTileRows, e.count,
                    mine_.sums);
  };
  for (Matrix m : {kGate, kUp}) {
    if (m == kGate || in_.dropout) take_columns(in_.x, e, tile, nullptr, columns);
    drop_tile(m, e, 0, e.count, tile * kTileRows, columns);
    sum(m);
    add_block(mine_.sums, rank, valid, args_.grads.a[m] + e.slot * rank * h + tile * kTileRows, h);
  }
  take_columns(args_.grad_out, e, tile, nullptr, columns);
  sum(kDown);
  add_transposed(mine_.sums, rank, valid,
                 args_.grads.b[kDown] + (e.slot * h + tile * kTileRows) * rank);
}

void BackwardPass::weight_gradients(const ExpertRows& e, int64_t tile) {
  const int64_t h = config_.hidden_size, inter = config_.intermediate_size;
  const int64_t column = tile * kTileRows, valid = valid_hidden(tile);
  float *x = mine_.columns[0], *d = mine_.columns[1], *sums = mine_.tile[0];
  take_columns(in_.x, e, tile, nullptr, x);
  take_columns(args_.grad_out, e, tile, plan().weights() + e.first, d);
  for (int p = 0; p < int(layer_.pools.size()); ++p) {
    const PoolPart& part = layer_.pools[size_t(p)];
    const int64_t tiles = part.size ? part.layout[kUp].tiles() : 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t at = part.begin + t * kTileRows,
                    n = std::min(kTileRows, part.size - t * kTileRows);
      for (Matrix m : {kGate, kUp}) {
        std::fill_n(sums, kTileRows * kTileRows, 0.0f);
        training_.outer(full_tile(p, m, e, tiles, t), kTileRows, n, x, kTileRows, e.count, sums);
        add_block(sums, n, valid, args_.grads.weight[m] + (e.slot * inter + at) * h + column, h);
      }
      std::fill_n(sums, kTileRows * kTileRows, 0.0f);
      training_.outer(d, kTileRows, valid, full_tile(p, kDown, e, tiles, t), kTileRows, e.count,
                      sums);
      add_block(sums, valid, n, args_.grads.weight[kDown] + (e.slot * h + column) * inter + at,
                inter);
    }
  }
}

}  // namespace kt
