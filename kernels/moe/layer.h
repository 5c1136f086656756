// The cold experts of one MoE layer: packed weights on the NUMA pools, and their forward pass.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../pack/pack.h"
#include "../sys/numa_memory.h"
#include "../sys/team.h"
#include "form.h"
#include "kt/kernel_table.h"
#include "timings.h"
#include "workspace.h"

namespace kt {

constexpr int kMaxPools = 64;

// What may be tuned per machine; no bit of a result depends on it, except that gemm_min_rows
// decides which kind of kernel runs. 0 stands for the default.
struct LayerTuning {
  ByMatrix<int64_t> gemm_min_rows{};  // rows of an expert from which GEMM kernels run; the table's
  int64_t row_block = 0;   // rows per kernel call, a multiple of 32 up to kRowBlock; kRowBlock
  int64_t task_bytes = 0;  // weights that a thread takes at a time in decode; kTaskBytes
};

struct LayerConfig {
  int64_t num_experts, top_k, hidden_size, intermediate_size;
  ByMatrix<MatrixForm> forms;
  Activation activation;
  std::vector<uint8_t> on_cpu;  // [num_experts], 1 for slots held here, which passes compute
  int64_t max_tokens;           // tokens per chunk: sizes the workspace
  const KernelTable* table;
  KernelKind kind;
  LayerTuning tuning;
};

// The orders in which gate and up have their columns (act-order), each a permutation of the H
// columns: column j of the source is column order[j] of the matrix. Null: its own.
using ColumnOrders = std::array<const int32_t*, 2>;

// Row-major weights of one expert: gate and up [I, H], down [H, I]. Biases are float32 and may be
// null.
struct ExpertSource {
  ByMatrix<WeightSource> weights;
  ByMatrix<const float*> bias;
  ColumnOrders order{};
};

// What a slot is loaded with.
struct SlotSource {
  int64_t slot;
  ExpertSource source;
};

// Counters since construction. A pass of more tokens than max_tokens counts as one forward, but its
// chunks count their experts each.
struct LayerStats {
  std::atomic<int64_t> forwards{0}, tokens{0}, expert_calls{0}, experts_touched{0};
  std::atomic<int64_t> vector_calls{0}, tile_calls{0};  // experts by kind of kernel
  std::atomic<int64_t> stolen_tasks{0};  // computed by another thread than the split gave them to
};

// Arguments of one forward pass. The pointers must stay valid until its job is done.
struct ForwardArgs {
  const void* x;  // [tokens, H] of dtype
  DType dtype;
  int64_t tokens;
  const int64_t* ids;    // [tokens, top_k], slots
  const float* weights;  // [tokens, top_k]
  void* out;             // [tokens, H] of dtype, or null
  const float* add;      // [tokens, H] added before the rounding, or null
  float* partial;        // [tokens, H]: receives the sum unrounded, or null
};

// The part of the intermediate dimension that one pool holds.
struct PoolPart {
  int64_t begin, size;            // of I; size may be 0
  ByMatrix<MatrixLayout> layout;  // of this part of the matrices
  sys::Mapping memory;            // experts held, in ascending slot order

  // A tile of gate, and the one of up beside it.
  int64_t pair_bytes() const { return layout[kGate].tile_bytes() + layout[kUp].tile_bytes(); }
  int64_t down_begin() const { return layout[kGate].bytes() + layout[kUp].bytes(); }
  int64_t expert_bytes() const { return down_begin() + layout[kDown].bytes(); }
  // Where the first tile of a matrix lies in an expert, and the bytes from one to the next.
  int64_t begin_of(Matrix m) const {
    return m == kGate ? 0 : m == kUp ? layout[kGate].tile_bytes() : down_begin();
  }
  int64_t stride_of(Matrix m) const {
    return m == kDown ? layout[kDown].tile_bytes() : pair_bytes();
  }

  // Tile i of all, in the order in which they lie in an expert: its number in its matrix, and its
  // place.
  struct Tile {
    Matrix matrix;
    int64_t number, at;
  };
  int64_t tiles() const { return size ? 2 * layout[kUp].tiles() + layout[kDown].tiles() : 0; }
  Tile tile(int64_t i) const {
    const int64_t pairs = 2 * layout[kUp].tiles();
    const Matrix m = i >= pairs ? kDown : i % 2 ? kUp : kGate;
    const int64_t number = m == kDown ? i - pairs : i / 2;
    return {m, number, begin_of(m) + number * stride_of(m)};
  }
};

// A bias of every expert held: rows of `width` padded to whole tiles, zeros where an expert has
// none.
struct BiasTable {
  sys::Mapping memory;
  int64_t width = 0;
  std::atomic<bool> any{false};  // whether an expert has one
  float* row(int64_t position) const {
    return reinterpret_cast<float*>(memory.data()) + position * round_up(width, kTileRows);
  }
};

// The orders of gate's and up's columns, for every expert held, once any has one.
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

// What the jobs of a layer work on. Jobs share its ownership, so a layer may go while some are
// queued; it does not own the team, which no worker may be the last to drop.
struct LayerState {
  LayerConfig config;
  std::vector<int64_t> position;  // slot -> place among the experts held, or -1
  std::vector<uint8_t> loaded;    // slot -> whether it was
  // slot -> whether passes compute it: config.on_cpu until set_on_cpu changes it. Only a job of the
  // team writes it, so it stays the same during a pass.
  std::vector<uint8_t> on_cpu;
  int64_t held = 0;
  std::vector<PoolPart> pools;
  ByMatrix<BiasTable> bias;
  OrderTable order;
  std::shared_ptr<Workspace> workspace;
  LayerStats stats;
  Timings timings;

  explicit LayerState(int threads) : timings(threads) {}
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
  // Copies what a slot has beside its packed weights; null: nothing.
  void keep_rest(int64_t slot, const ByMatrix<const float*>& biases, const ColumnOrders& orders);
};

class MoeLayer {
 public:
  // Throws std::invalid_argument for a configuration that no kernel serves.
  MoeLayer(std::shared_ptr<sys::Team> team, LayerConfig config);

  // Packs experts, with all threads of the team; blocks. Several small ones at once keep the
  // threads busier. A slot loaded twice keeps the later weights. Throws std::invalid_argument when
  // a slot is named twice or not held here, or a weight cannot be represented; what was loaded
  // before is then as it was, and slots not loaded before count as not loaded.
  void load(const std::vector<SlotSource>& experts);

  // The same from packed tiles as save_packed writes them; they may begin at any address. Throws
  // std::invalid_argument for a code or scale that packing would not have made; the slot must then
  // be loaded again.
  void load_packed(int64_t slot, const ByMatrix<const uint8_t*>& tiles,
                   const ByMatrix<const float*>& bias);

  // Writes the packed tiles of a whole matrix of a slot, [tiles, tile_bytes] of its layout: the
  // same bytes whatever the pools. Throws std::invalid_argument for a slot whose columns have
  // orders, which packed tiles do not tell.
  void save_packed(int64_t slot, int matrix, uint8_t* dst) const;

  // Sets which slots passes compute, [num_experts], 1 for those; the others' routes are skipped.
  // Waits for the passes submitted before, which still compute the old ones. Experts that a stream
  // defers belong to their pass, so the stream must be drained first. Weights stay: a slot switched
  // off can be switched on again. Throws std::invalid_argument for a slot that is not loaded; then
  // nothing changes.
  void set_on_cpu(std::vector<uint8_t> on_cpu);

  // Queues a forward pass and returns at once. All experts held must have been loaded.
  std::shared_ptr<sys::Job> submit(const ForwardArgs& args);

  // Dequantised weights, columns in the matrix's own order: matrix 0 gate, 1 up [I, H], 2 down [H,
  // I].
  void unpack(int64_t slot, int matrix, float* dst) const;

  const LayerConfig& config() const { return state_->config; }
  // For jobs on this layer that others make.
  sys::Team& team() const { return *team_; }
  const std::shared_ptr<LayerState>& state() const { return state_; }
  const LayerStats& stats() const { return state_->stats; }
  Timings& timings() { return state_->timings; }
  int64_t packed_bytes() const;

 private:
  void need_slot(int64_t slot) const;

  std::shared_ptr<sys::Team> team_;
  std::shared_ptr<LayerState> state_;
};

}  // namespace kt
