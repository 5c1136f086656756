// The memory of a layer, on which its jobs work: packed weights in the NUMA pools, biases, column
// orders, counters.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "../sys/numa_memory.h"
#include "../sys/team.h"
#include "config.h"
#include "timings.h"
#include "workspace.h"

namespace kt {

constexpr int kMaxPools = 64;

// Counters since construction. A pass of more than max_tokens tokens counts as one forward, but
// each of its chunks counts its experts.
struct LayerStats {
  std::atomic<int64_t> forwards{0}, tokens{0}, expert_calls{0}, experts_touched{0};
  std::atomic<int64_t> vector_calls{0}, tile_calls{0};  // experts, by kind of kernel
  std::atomic<int64_t> stolen_tasks{0};                 // computed by another thread than planned
};

// The part of the intermediate dimension that one pool holds.
struct PoolPart {
  int64_t begin, size;            // of I; size may be 0
  ByMatrix<MatrixLayout> layout;  // of this part of the matrices
  sys::Mapping memory;            // the experts held, in ascending slot order

  bool has_gate() const { return layout[kGate].rows > 0; }
  int64_t gate_tile_bytes() const { return has_gate() ? layout[kGate].tile_bytes() : 0; }
  // A tile of gate, if there is one, together with the tile of up that follows it.
  int64_t pair_bytes() const { return gate_tile_bytes() + layout[kUp].tile_bytes(); }
  int64_t down_begin() const { return layout[kGate].bytes() + layout[kUp].bytes(); }
  int64_t expert_bytes() const { return down_begin() + layout[kDown].bytes(); }
  // Offset of the first tile of a matrix within an expert, and the distance between its tiles.
  int64_t begin_of(Matrix m) const {
    return m == kGate ? 0 : m == kUp ? gate_tile_bytes() : down_begin();
  }
  int64_t stride_of(Matrix m) const {
    return m == kDown ? layout[kDown].tile_bytes() : pair_bytes();
  }

  // Tile i of an expert, in memory order: its matrix, its number in the matrix, and its offset.
  struct Tile {
    Matrix matrix;
    int64_t number, at;
  };
  int64_t tiles() const { return size ? tiles_before_down() + layout[kDown].tiles() : 0; }
  Tile tile(int64_t i) const {
    const int64_t down = i - tiles_before_down(), paired = has_gate() ? 2 : 1;
    const Matrix m = down >= 0 ? kDown : i % paired == paired - 1 ? kUp : kGate;
    const int64_t number = m == kDown ? down : i / paired;
    return {m, number, begin_of(m) + number * stride_of(m)};
  }

 private:
  int64_t tiles_before_down() const { return layout[kGate].tiles() + layout[kUp].tiles(); }
};

// A bias of every expert held: rows of `width` padded to whole tiles. The row of an expert without
// bias is zeros.
struct BiasTable {
  sys::Mapping memory;
  int64_t width = 0;
  std::atomic<bool> any{false};  // whether any expert has one
  float* row(int64_t position) const {
    return reinterpret_cast<float*>(memory.data()) + position * round_up(width, kTileRows);
  }
};

// The column orders of gate and up, for every expert held, once any expert has one. Experts without
// gate have that of up for both.
struct OrderTable {
  sys::Mapping memory;  // [expert][gate, up][H]
  int64_t width = 0;
  std::atomic<bool> any{false};
  // By expert: whether it has orders, and whether those of gate and up are the same.
  std::vector<uint8_t> present, same;

  void resize(int64_t experts, int64_t hidden);
  void keep(int64_t position, const ColumnOrders& source);
  int32_t* row(int64_t position, Matrix m) const {
    return reinterpret_cast<int32_t*>(memory.data()) + (2 * position + m) * width;
  }
};

// The state on which the jobs of a layer work. Jobs share its ownership, so a layer may be deleted
// while some are queued. It does not own the team, because no worker may be the team's last owner.
struct LayerState {
  LayerConfig config;
  std::vector<int64_t> position;  // slot -> position among the experts held, or -1
  std::vector<uint8_t> loaded;    // slot -> whether it is loaded
  // slot -> whether passes compute it: config.on_cpu until MoeLayer::set_on_cpu changes it. Only a
  // job of the team writes it, so it stays the same during a pass.
  std::vector<uint8_t> on_cpu;
  int64_t held = 0;
  std::vector<PoolPart> pools;
  ByMatrix<BiasTable> bias;
  OrderTable order;
  std::shared_ptr<Workspace> workspace;
  LayerStats stats;
  Timings timings;

  // Throws std::invalid_argument for a configuration that no kernel supports.
  LayerState(const sys::Team& team, LayerConfig config);
  LayerState(const LayerState&) = delete;
  const FormatKernels& kernels(Matrix m) const {
    return config.table->format[int(config.forms[m].format)];
  }
  uint8_t* expert(int pool, int64_t slot) const {
    const PoolPart& part = pools[size_t(pool)];
    return part.memory.data() + position[size_t(slot)] * part.expert_bytes();
  }
  const float* bias_of(Matrix m, int64_t slot) const {
    return bias[m].any ? bias[m].row(position[size_t(slot)]) : nullptr;
  }
  // Copies the biases and column orders of a slot; null: none.
  void keep_rest(int64_t slot, const ByMatrix<const float*>& biases, const ColumnOrders& orders);
};

}  // namespace kt
