#include "forward.h"

#include <algorithm>
#include <utility>

#include "pass.h"

namespace kt {
namespace {

// The results are those of the inference pass (moe/prefill.h), plus the adapters'. Phases of a
// chunk:
//   x         A rows of the base products, scaling * x A^T of gate and up
//   gate_up   gate and up, which are kept; activation; h to A rows, and to rows for down's adapter
//   quantise  h with one scale per row, once the whole row is there
//   adapter   scaling * h A^T of down, by pool, then summed over the pools
//   down      products with down, kept by pair; or their weighted sums over the experts of a group
//   finish    sums over pools and groups, and over experts if kept by pair; one rounding
class TrainingForward : TrainingPass {
 public:
  TrainingForward(TrainingState& state, const TrainingForwardArgs& args, SavedForward* saved,
                  sys::Worker& worker)
      : TrainingPass(state, worker,
                     {args.x, args.ids, args.weights, args.tokens, args.seed,
                      args.drop && state.config.dropout > 0, state.layer->on_cpu, true}),
        out_(args.out),
        saved_(saved) {}
  void run() {
    // Only a job of the team changes the slots. Nobody reads the copy in this job.
    if (saved_ && worker_.rank == 0) std::ranges::copy(layer_.on_cpu, saved_->on_cpu.begin());
    map_pages(out_, in_.tokens * config_.hidden_size);
    each_chunk([this] { chunk(); });
  }

 private:
  void chunk() {
    if (saved_) keep_x();
    take_x(saved_ && state_.config.keeps_ranks() ? as<float>(saved_->ranks) : nullptr);
    gate_up([this](const ExpertRows& e, int64_t tile, int64_t first, int64_t m, float* gate,
                   float* up) {
      if (saved_ && !state_.config.recompute)
        keep_gate_up(as<uint16_t>(saved_->gate_up[size_t(worker_.pool)]), first_ * config_.top_k, e,
                     tile, first, m, gate, up);
      table_.activate(gate, up, nullptr, nullptr, nullptr, config_.activation, m, gate);
      h_.keep(e, gate, first, m, tile);
      adapter_h(e, tile, first, m, gate);
    });
    quantise_h();
    adapter_of_h();
    if (keeps_pairs()) {
      down_by_pair();
      return add_pairs(true, out_);
    }
    down();
    finish_sums(out_);
  }

  // Each thread a part. Nobody reads it in this job.
  void keep_x() {
    const int64_t h = config_.hidden_size, n = worker_.team_threads;
    const int64_t begin = first_ + count_ * worker_.rank / n;
    const int64_t end = first_ + count_ * (worker_.rank + 1) / n;
    std::copy(in_.x + begin * h, in_.x + end * h, as<uint16_t>(saved_->x) + begin * h);
  }

  void adapter_h(const ExpertRows& e, int64_t tile, int64_t first, int64_t m, float* h) {
    if (shares_rows(e, kDown)) return;
    drop_tile(kDown, e, first, m, part().begin + tile * kTileRows, h);
    const BF16Rows to = rows_in(pool_space().h, part().size);
    to.put_tile(table_, row(e) + first, tile, h, m, valid_inter(tile));
  }

  void quantise_h() {
    if (!h_.any_whole(plan())) return;
    constexpr int64_t kParts = 4;  // of an expert's rows
    const int64_t n = part().size ? plan().active() : 0;
    pool_phase(
        n, kParts, [&](int64_t i) { return plan().expert(i).count; },
        [&](int64_t i, int64_t share) {
          const ExpertRows& e = plan().expert(i);
          if (!h_.whole(e)) return;
          const ActRows to = h_.rows(e);
          for (int64_t r = e.count * share / kParts; r < e.count * (share + 1) / kParts; ++r)
            h_.quantise(e, to, r);
        });
  }

  void adapter_of_h() {
    const auto cost = [&](int64_t item) { return plan().item(item).rows(); };
    const int64_t tiles = part().size ? rank_tiles() : 0;
    pool_phase(plan().items(), tiles, cost, [&](int64_t number, int64_t tile) {
      const WorkItem& item = plan().item(number);
      const ExpertRows& e = plan().expert(item.expert);
      rank_of_h(
          item, tile,
          shares_rows(e, kDown) ? h_.rows(e) : rows_in(pool_space().h, part().size).from(row(e)));
    });
    const int64_t padded = lora_.rank_padded();
    each_pair([&](const ExpertRows& e, int64_t r) {
      float* sum = rank_values(kDown, e) + r * padded;
      sum_rank_parts(kDown, e, r, sum);
      rank_rows(kDown).put_row(table_, row(e) + r, sum, DType::kFP32, padded);
    });
  }

  void down() {
    const int64_t tiles = part().size ? hidden_tiles() : 0, groups = plan().groups();
    // A thread that has several groups of a tile has them in succession.
    const auto cost = [&](int64_t i) { return plan().group(i % groups).pairs; };
    pool_phase(tiles * groups, 1, cost, [&](int64_t i, int64_t) {
      const int64_t tile = i / groups, group = i % groups;
      float* sum = sum_of(worker_.pool, group, tile);
      std::fill_n(sum, count_ * kTileRows, 0.0f);
      for (int64_t n = plan().group(group).first; n < plan().group(group).last; ++n) {
        const ExpertRows& e = plan().expert(n);
        down_products(e, tile, 0, e.count, [&](int64_t r, int64_t m, const float* values) {
          table_.merge(values, nullptr, plan().weights() + e.first + r,
                       plan().tokens() + e.first + r, m, sum);
        });
      }
    });
  }

  void down_by_pair() {
    const int64_t tiles = part().size ? hidden_tiles() : 0;
    const auto cost = [&](int64_t item) { return std::max<int64_t>(plan().item(item).rows(), 32); };
    pool_phase(plan().items(), tiles, cost, [&](int64_t number, int64_t tile) {
      const WorkItem& item = plan().item(number);
      const ExpertRows& e = plan().expert(item.expert);
      down_products(e, tile, item.first, item.last, [&](int64_t r, int64_t m, const float* values) {
        keep_by_pair(kGate, e.first + r, m, tile, values, nullptr);
      });
    });
  }

  // f(first, m, values) with products of rows [begin, end), with adapter and bias.
  template <class F>
  void down_products(const ExpertRows& e, int64_t tile, int64_t begin, int64_t end, F f) {
    const MatrixLayout& layout = part().layout[kDown];
    const uint8_t* weights = layer_.expert(worker_.pool, e.slot) + part().begin_of(kDown);
    const float* bias = first_part() ? layer_.bias_of(kDown, e.slot) : nullptr;
    const ActRows h = h_.rows(e);
    float *values = mine_.tile[0], *adapter = mine_.tile[1];
    row_blocks(begin, end, [&](int64_t r, int64_t m) {
      pass_.kernel(e, kDown).product(weights + tile * layout.tile_bytes(), layout, h.from(r), m,
                                     values);
      near_rows(first_part() ? m : 0, [&](int64_t at, int64_t n) {
        adapter_product(kDown, kLoraB, e.slot, tile, rank_rows(kDown).from(row(e) + r + at), n,
                        adapter);
        training_.add(values + at * kTileRows, adapter, bias ? bias + tile * kTileRows : nullptr,
                      n);
      });
      f(r, m, values);
    });
  }

  uint16_t* const out_;
  SavedForward* const saved_;
};

}  // namespace

TrainingForwardJob::TrainingForwardJob(std::shared_ptr<TrainingState> state,
                                       const TrainingForwardArgs& args,
                                       std::shared_ptr<SavedForward> saved)
    : state_(std::move(state)), args_(args), saved_(std::move(saved)) {
  state_->layer->workspace->renew_after_fork();
}

void TrainingForwardJob::run(sys::Worker& worker) noexcept {
  TrainingForwardArgs args = args_;
  if (saved_) {
    args.ids = saved_->ids.data();
    args.weights = saved_->weights.data();
  }
  TrainingForward(*state_, args, saved_.get(), worker).run();
}

void TrainingForwardJob::finished() noexcept {
  if (!saved_) return;
  saved_->complete.store(true, std::memory_order_release);
  saved_.reset();
}

}  // namespace kt
