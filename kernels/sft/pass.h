// One worker's view of a training pass: what forward and backward share.
#pragma once
#include <algorithm>

#include "../moe/phases.h"
#include "rows.h"
#include "state.h"

namespace kt {

// Tokens of a pass, and where it reads them.
struct TrainingInput {
  const uint16_t* x;     // bf16 [tokens][H]
  const int64_t* ids;    // [tokens][top_k]
  const float* weights;  // [tokens][top_k]
  int64_t tokens;
  uint64_t seed;
  bool dropout;
  const std::vector<uint8_t>& on_cpu;  // [num_experts]: the slots that the pass computes
  bool base;                           // whether it multiplies x with the layer's weights

  bool computes(int64_t id) const {
    return id >= 0 && id < int64_t(on_cpu.size()) && on_cpu[size_t(id)];
  }
};

// A pass is a number of phases, each shared among the threads as tasks, with barriers of the whole
// team between them. It goes over the tokens in chunks as long as the layer's, each with a plan of
// its own, which is the same in forward and backward. The base products are those of inference, by
// the same kernels; those of adapters are GEMM kernels of bf16 weights.
class TrainingPass {
 protected:
  TrainingPass(TrainingState& state, sys::Worker& worker, const TrainingInput& in);

  // Runs chunk() for each part of the tokens.
  template <class F> void each_chunk(F chunk) {
    if (!in_.tokens) return;  // without a barrier, pass_.end() would race with the other threads
    table_.thread_begin();
    for (first_ = 0; first_ < in_.tokens; first_ += count_) {
      count_ = std::min(config_.max_tokens, in_.tokens - first_);
      const Chunk present{batch_, first_, count_, false};
      const XRows rows(pass_, present);
      chunk_ = &present;
      x_ = &rows;
      if (worker_.rank == 0) {
        const int64_t skipped = first_ * config_.top_k;
        make_plan(layer_, in_.on_cpu, in_.ids + skipped, in_.weights + skipped, count_, work_.plan);
      }
      const int64_t n = in_.base ? count_ : 0;
      team_phase(ceil_div(n, kRowTask), [&](int64_t task) {
        rows.convert(task * kRowTask, std::min((task + 1) * kRowTask, n));
      });
      chunk();
      worker_.team_barrier();  // before the next one takes the buffers
    }
    pass_.end();
    table_.thread_end();
  }

  // Phases. Each ends with a barrier of the team.
  //
  // f(task) for n tasks of about the same cost, among all threads.
  template <class F> void team_phase(int64_t n, F f) {
    pass_.split(pass_.team(), n);
    run_tasks(pass_.team(), f);
  }
  // f(segment, task) for `each` tasks of each segment, whose tasks have cost(segment) >= 1, among
  // the threads of the pool.
  template <class Cost, class F> void pool_phase(int64_t segments, int64_t each, Cost cost, F f) {
    segment_phase(pass_.pool(), segments, each, cost, f);
  }
  // The same among all threads.
  template <class Cost, class F> void team_phase(int64_t segments, int64_t each, Cost cost, F f) {
    segment_phase(pass_.team(), segments, each, cost, f);
  }
  // f(first, last) for rows [first, last) of a range in blocks of a kernel call.
  template <class F> static void row_blocks(int64_t first, int64_t last, F f) {
    const int64_t block = even_part(last - first, kRowBlock);
    for (int64_t r = first; r < last; r += block) f(r, std::min(block, last - r));
  }

  // f(first, count) for parts of a kernel call's m rows whose values stay in the nearest cache.
  template <class F> static void near_rows(int64_t m, F f) {
    for (int64_t r = 0; r < m; r += kTileRows) f(r, std::min(kTileRows, m - r));
  }

  // Forward, up to the activation.
  //
  // A rows of the base products; the adapters' scaling * x A^T of gate and up, as rows and in
  // float32, the latter also by pair in `kept` unless null (SavedForward::ranks).
  void take_x(float* kept);
  float* kept_ranks(float* kept, const ExpertRows& e, int64_t row, Matrix m) const {
    return kept + ((first_ * config_.top_k + e.first + row) * 2 + m) * lora_.rank();
  }
  // keep(expert, tile, first, m, gate, up): the values of gate and up of m rows from `first` on,
  // with adapters and biases, to be used as scratch.
  template <class F> void gate_up(F keep);
  // Rounds a tile of both to bf16, to where saved_tile() of `memory` says.
  void keep_gate_up(uint16_t* memory, int64_t pairs_before, const ExpertRows& e, int64_t tile,
                    int64_t first, int64_t m, const float* gate, const float* up) const;
  // A tile of the products of an item's rows of I with A of down, into the pool's `rank`; `rows`
  // are those of its expert.
  void rank_of_h(const WorkItem& item, int64_t tile, const ActRows& rows);
  // f(expert, row) for all pairs, as a phase of the team.
  template <class F> void each_pair(F f) {
    constexpr int64_t kPairs = 8;
    team_phase(ceil_div(plan().pairs(), kPairs), [&](int64_t task) {
      plan().each_expert(task * kPairs, (task + 1) * kPairs,
                         [&](const ExpertRows& e, int64_t first, int64_t last) {
                           for (int64_t i = first; i < last; ++i) f(e, i - e.first);
                         });
    });
  }
  // f(expert, begin, end) for parts of the rows of all experts, as a phase of the team. A part
  // begins at a multiple of 32. Its rows stay in a near cache.
  template <class F> void each_part(F f) {
    constexpr int64_t kParts = 4;  // of an item
    const auto cost = [&](int64_t item) { return plan().item(item).rows(); };
    team_phase(plan().items(), kParts, cost, [&](int64_t number, int64_t part) {
      const WorkItem& item = plan().item(number);
      const int64_t each = round_up(ceil_div(item.rows(), kParts), kTileRows);
      const int64_t begin = item.first + part * each, end = std::min(begin + each, item.last);
      if (begin < end) f(plan().expert(item.expert), begin, end);
    });
  }
  // Keeps a tile of such products of rows [first, first + m) of an expert.
  void keep_rank_part(const ExpertRows& e, Matrix matrix, int64_t first, int64_t m, int64_t tile,
                      const float* values) const;
  // The sums over pools of what they have in `rank`, times the scaling.
  void sum_rank_parts(Matrix m, const ExpertRows& e, int64_t row, float* sum) const;

  // out = rows times the tile of an adapter's factor, by the kernel of bf16 weights.
  void adapter_product(Matrix m, LoraFactor f, int64_t slot, int64_t tile, const ActRows& rows,
                       int64_t count, float* out) const {
    const MatrixLayout& layout = lora_.layout(m, f, worker_.pool);
    BF16Rows::kernel(table_).product(
        lora_.tiles(m, f, worker_.pool, slot) + tile * layout.tile_bytes(), layout, rows, count,
        out);
  }
  // Whether the rows of a base product are what its adapter takes, too: without dropout, where the
  // kernel takes bf16 values in the same form.
  bool shares_rows(const ExpertRows& e, Matrix m) const {
    const ProductKernel &base = pass_.kernel(e, m), &adapter = BF16Rows::kernel(table_);
    return in_.base && !in_.dropout && base.act == adapter.act && base.blocked == adapter.blocked &&
           (m == kDown || !layer_.order.any);
  }
  // The adapter's rows of x for gate or up. They differ with dropout only.
  ActRows adapter_x(const ExpertRows& e, Matrix m) const {
    if (shares_rows(e, m)) return x_->rows(plan(), e, m);
    return rows_in(space_.x[in_.dropout ? m : kGate], config_.hidden_size).from(row(e));
  }
  DropKey drop_key(Matrix m, int64_t slot) const;
  // Dropout of one tile of columns, of m of the expert's rows from `first` on; `column` is the
  // column's number in the whole matrix.
  void drop_tile(Matrix m, const ExpertRows& e, int64_t first, int64_t count, int64_t column,
                 float* values) const;

  const Plan& plan() const { return work_.plan; }
  const PoolPart& part() const { return layer_.pools[size_t(worker_.pool)]; }
  // The pool that adds what must count once.
  bool first_part() const { return part().begin == 0; }
  int64_t inter_tiles() const { return part().size ? part().layout[kUp].tiles() : 0; }
  int64_t hidden_tiles() const { return ceil_div(config_.hidden_size, kTileRows); }
  int64_t rank_tiles() const { return lora_.rank_padded() / kTileRows; }
  int64_t valid_inter(int64_t tile) const {
    return std::min(kTileRows, part().size - tile * kTileRows);
  }
  int64_t valid_hidden(int64_t tile) const {
    return std::min(kTileRows, config_.hidden_size - tile * kTileRows);
  }
  int64_t valid_rank(int64_t tile) const {
    return std::min(kTileRows, lora_.rank() - tile * kTileRows);
  }
  // The first row of an expert in the buffers of rows: a block's, after all rows of the expert
  // before, as ceil(first + count, 16) >= ceil(first, 16) + ceil(count, 16) - 16.
  int64_t row(const ExpertRows& e) const { return row_in(e, kBlockRows); }
  // The same in the buffers of turned rows.
  int64_t turned_row(const ExpertRows& e) const { return row_in(e, kTileRows); }
  BF16Rows rows_in(const sys::Mapping& memory, int64_t columns) const {
    return {table_, memory.data(), columns};
  }
  BF16Rows rank_rows(Matrix m) const { return rows_in(space_.rank_rows[m], lora_.rank()); }
  float* rank_values(Matrix m, const ExpertRows& e) const {
    return as<float>(space_.rank_values[m]) + row(e) * lora_.rank_padded();
  }
  float* rank_part(int pool, Matrix m, const ExpertRows& e) const {
    return as<float>(space_.pool[size_t(pool)].rank[m]) + row(e) * lora_.rank_padded();
  }
  TrainingWorkspace::Pool& pool_space() const { return space_.pool[size_t(worker_.pool)]; }
  // Sums over experts of a tile of H, in a pool and group: the inference layer's buffer.
  float* sum_of(int pool, int64_t group, int64_t tile) const {
    return kt::sum_of(layer_, plan(), *chunk_, pool, group, tile);
  }
  // Writes to every page of an array of n values, each thread to a contiguous part, so that each
  // new page has its page fault in one thread. finish_sums works by columns: without this, all
  // threads would fault on the same page at the same time.
  void map_pages(uint16_t* values, int64_t n) const {
    constexpr int64_t kPage = 4096 / sizeof(uint16_t);
    const int64_t begin = n * worker_.rank / worker_.team_threads;
    const int64_t end = n * (worker_.rank + 1) / worker_.team_threads;
    for (int64_t i = begin; i < end; i += kPage) values[i] = 0;
    if (begin < end) values[end - 1] = 0;  // the part need not begin with a page
  }
  // Rounds all pools' and groups' sums of every tile of H to bf16 rows of `out`.
  void finish_sums(uint16_t* out);

  // Whether products with results of H columns are kept by pair. Otherwise an expert's are added to
  // the sums of its group at once, by tasks that go over all experts of the group. With tiles that
  // takes longer, as an expert's rows come from a far cache for each task: down 1.4 to 1.5 times as
  // long. Vector kernels spend more time with each row, and do not need the memory.
  bool keeps_pairs() const { return training_.turned; }
  // A row of H of a pair, which a phase keeps instead of adding it to its token's sum.
  float* by_pair(int pool, Matrix m, int64_t pair) const {
    return as<float>(space_.pool[size_t(pool)].by_pair[m]) +
           pair * round_up(config_.hidden_size, kTileRows);
  }
  void keep_by_pair(Matrix matrix, int64_t pair, int64_t m, int64_t tile, const float* values,
                    const float* more) const {
    training_.keep(values, more, m, by_pair(worker_.pool, matrix, pair) + tile * kTileRows,
                   round_up(config_.hidden_size, kTileRows));
  }
  // Notes where the pairs of rows [begin, end) of an expert are, for add_pairs.
  void note_pairs(const ExpertRows& e, int64_t begin, int64_t end) const {
    for (int64_t pair = e.first + begin; pair < e.first + end; ++pair)
      space_.pair[size_t(plan().routes()[pair])] = int32_t(pair);
  }
  // The same sums as finish_sums', in the same order, of what was kept by pair for kGate: times the
  // router weights if `weighted`.
  void add_pairs(bool weighted, uint16_t* out);

  TrainingState& state_;
  LayerState& layer_;
  const LayerConfig& config_;
  const KernelTable& table_;
  const TrainingKernels& training_;
  const LoraWeights& lora_;
  Workspace& work_;
  TrainingWorkspace& space_;
  sys::Worker& worker_;
  TrainingSpace& mine_;
  Pass pass_;
  const HRows h_;
  const TrainingInput in_;
  const ForwardArgs batch_;  // in_, as the code of inference takes it
  // The present chunk: its tokens, and the A rows of the base products.
  int64_t first_ = 0, count_ = 0;
  const Chunk* chunk_ = nullptr;
  const XRows* x_ = nullptr;

 private:
  template <class F> void run_tasks(const Pass::Threads& among, F f) {
    pass_.share(among, 4, [&](const sys::TaskRange& r) {
      for (int64_t task = r.first; task < r.last; ++task) f(task);
    });
    worker_.team_barrier();
  }
  template <class Cost, class F>
  void segment_phase(const Pass::Threads& among, int64_t segments, int64_t each, Cost cost, F f) {
    pass_.split(among, segments, each, cost);
    run_tasks(among, [&](int64_t task) { f(task / each, task % each); });
  }

  int64_t row_in(const ExpertRows& e, int64_t unit) const {
    return round_up(e.first, unit) + unit * (&e - &plan().expert(0));
  }
  void put_adapter_x(const ExpertRows& e, Matrix m, int64_t row);
  void a_of_x(const ExpertRows& e, Matrix m, int64_t begin, int64_t end, float* kept);
};

template <class F> void TrainingPass::gate_up(F keep) {
  const int64_t tiles = inter_tiles();
  const auto cost = [&](int64_t item) { return std::max<int64_t>(plan().item(item).rows(), 32); };
  pool_phase(plan().items(), tiles, cost, [&](int64_t number, int64_t tile) {
    const WorkItem& item = plan().item(number);
    const ExpertRows& e = plan().expert(item.expert);
    float *values[2] = {mine_.tile[0], mine_.tile[1]}, *adapter = mine_.tile[2];
    row_blocks(item.first, item.last, [&](int64_t r, int64_t m) {
      for (Matrix matrix : {kGate, kUp}) {
        const MatrixLayout& layout = part().layout[matrix];
        pass_.kernel(e, matrix).product(
            layer_.expert(worker_.pool, e.slot) + part().begin_of(matrix) +
                tile * part().stride_of(matrix),
            layout, x_->rows(plan(), e, matrix).from(r), m, values[matrix]);
      }
      near_rows(m, [&](int64_t at, int64_t n) {
        float* near[2] = {values[0] + at * kTileRows, values[1] + at * kTileRows};
        for (Matrix matrix : {kGate, kUp}) {
          adapter_product(matrix, kLoraB, e.slot, tile, rank_rows(matrix).from(row(e) + r + at), n,
                          adapter);
          const float* bias = layer_.bias_of(matrix, e.slot);
          training_.add(near[matrix], adapter,
                        bias ? bias + part().begin + tile * kTileRows : nullptr, n);
        }
        keep(e, tile, r + at, n, near[0], near[1]);
      });
    });
  });
}

}  // namespace kt
