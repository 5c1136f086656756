// Phases and parts of phases that the drivers of a forward pass share. A driver derives from Phases
// and lists its phases (decode.cpp, prefill.cpp).
#pragma once
#include "h_rows.h"
#include "x_rows.h"

namespace kt {

// Rows per task, if a task only converts rows.
constexpr int64_t kRowTask = 8;

// Makes the plan of a chunk, for any driver. ids and weights are [tokens, top_k]; on_cpu
// [num_experts] says which slots are computed.
void make_plan(const LayerState& layer, const std::vector<uint8_t>& on_cpu, const int64_t* ids,
               const float* weights, int64_t tokens, Plan& plan);

// The chunk from token `first` on.
Chunk chunk_at(const LayerState& layer, const ForwardArgs& args, int64_t first);

// The first phase of every driver makes the chunk's plan and its rows of x. Few tokens need no
// barrier, because every thread makes both itself.
const Plan& start_chunk(Pass& pass, const Chunk& chunk, const XRows& x);

// The weighted sums of a group's experts, [tokens of the chunk][32] of a tile.
float* sum_of(const LayerState& layer, const Plan& plan, const Chunk& chunk, int pool,
              int64_t group, int64_t tile);

// Called when a tile's sums of all pools and groups are complete: adds them and the previous
// layer's deferred sum, and rounds once.
void finish_tile(const LayerState& layer, const Plan& plan, const Chunk& chunk, int64_t tile);

class Phases {
 public:
  // The chunk's plan and rows of x must exist.
  Phases(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x);

 protected:
  // Makes the rows of x for experts that have their own, in tasks of `pairs` pairs; then a barrier.
  void gather(int64_t pairs);
  // Computes h from gate, up and the activation, in tasks of at most `tiles` tiles; then a barrier.
  void gate_up(int64_t tiles);
  // The products only, passed to keep(expert, gate, up, first row, rows, tile). Without a gate in
  // the layer, gate is scratch memory.
  template <class F> void gate_up_products(int64_t tiles, F keep);
  // An expert's products with the tiles [first, last) of down, in blocks of rows. keep(first row,
  // rows, tile) reads each result from the thread's scratch.
  template <class F>
  void down_products(const ExpertRows& e, const ActRows& h, int64_t first, int64_t last, F keep);
  int64_t down_tiles() const { return part().size ? part().layout[kDown].tiles() : 0; }
  // Cost of a tile. Below some number of rows, reading the weights dominates.
  int64_t tile_cost(const WorkItem& item, Matrix m) const {
    return std::max<int64_t>(item.rows(), plan_.expert(item.expert).gemm[m] ? 32 : 8);
  }
  // Zeroes a tile of a group's sums; add_rows adds the results of rows [first, first + m) of an
  // expert.
  float* new_sum(int pool, int64_t group, int64_t tile) const;
  void add_rows(int pool, const ExpertRows& e, int64_t first, int64_t m, int64_t tile,
                const float* results, float* sum) const;
  // The router weights of an expert's rows from `first` on.
  const float* router_weights(const ExpertRows& e, int64_t first) const {
    return plan_.weights() + e.first + first;
  }

  const PoolPart& part() const { return pass_.part(); }

  Pass& pass_;
  const LayerState& layer_;
  const LayerConfig& config_;
  const int pool_;
  const Chunk& chunk_;
  const Plan& plan_;
  const XRows& x_;
  const HRows h_;

 private:
  // The rows per kernel call.
  int64_t block_of(int64_t rows) const {
    return even_part(rows, config_.tuning.row_block ? config_.tuning.row_block : kRowBlock);
  }
};

template <class F> void Phases::gate_up_products(int64_t most, F keep) {
  const MatrixLayout &gate_layout = part().layout[kGate], &up_layout = part().layout[kUp];
  const bool gated = part().has_gate();
  float* const gate = pass_.space.scratch;
  float* const up = gate + (kRowBlock + kRowSlack) * kTileRows;
  const int64_t tiles = up_layout.tiles();
  pass_.costed_phase(
      Phase::kGateUp, tiles ? plan_.items() : 0, tiles,
      [&](int64_t i) { return tile_cost(plan_.item(i), kGate); }, most,
      [&](int64_t i, int64_t first, int64_t last) {
        const WorkItem& item = plan_.item(i);
        const ExpertRows& e = plan_.expert(item.expert);
        const auto gate_product = pass_.kernel(e, kGate).product;
        const auto up_product = pass_.kernel(e, kUp).product;
        const ActRows gate_rows = x_.rows(plan_, e, kGate), up_rows = x_.rows(plan_, e, kUp);
        const uint8_t* weights = layer_.expert(pool_, e.slot);
        const int64_t block = block_of(item.rows());
        // The rows of an item stay in L2 from one tile to the next.
        for (int64_t tile = first; tile < last; ++tile) {
          const uint8_t* gate_tile = weights + tile * part().pair_bytes();
          for (int64_t r = item.first; r < item.last; r += block) {
            const int64_t m = std::min(block, item.last - r);
            if (gated) gate_product(gate_tile, gate_layout, gate_rows.from(r), m, gate);
            up_product(gate_tile + part().gate_tile_bytes(), up_layout, up_rows.from(r), m, up);
            keep(e, gate, up, r, m, tile);
          }
        }
      });
}

template <class F>
void Phases::down_products(const ExpertRows& e, const ActRows& h, int64_t first, int64_t last,
                           F keep) {
  const MatrixLayout& layout = part().layout[kDown];
  const uint8_t* weights = layer_.expert(pool_, e.slot) + part().down_begin();
  const auto product = pass_.kernel(e, kDown).product;
  const int64_t block = block_of(e.count);
  for (int64_t r = 0; r < e.count; r += block) {
    const int64_t m = std::min(block, e.count - r);
    for (int64_t tile = first; tile < last; ++tile) {
      product(weights + tile * layout.tile_bytes(), layout, h.from(r), m, pass_.space.scratch);
      keep(r, m, tile);
    }
  }
}

}  // namespace kt
