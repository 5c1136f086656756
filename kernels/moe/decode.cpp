#include "drivers.h"
#include "phases.h"

namespace kt {
namespace {

constexpr int64_t kTaskBytes = 64 << 10;  // weights that a thread takes at a time

// The tasks of down are (expert, tile), so its weights are read in an even stream. The results of
// each pair are stored and summed afterwards.
class Decode : Phases {
 public:
  using Phases::Phases;
  void run() {
    gather(1);
    gate_up(tiles_at_once(part().pair_bytes()));
    down();
    finish();
  }

 private:
  int64_t tiles_at_once(int64_t tile_bytes) const {
    const int64_t bytes = config_.tuning.task_bytes ? config_.tuning.task_bytes : kTaskBytes;
    return std::max<int64_t>(1, bytes / std::max<int64_t>(tile_bytes, 1));
  }

  void down() {
    const int64_t tiles = down_tiles();
    pass_.costed_phase(
        Phase::kDown, tiles ? plan_.items() : 0, tiles,
        [&](int64_t i) { return tile_cost(plan_.item(i), kDown); },
        tiles_at_once(part().layout[kDown].tile_bytes()),
        [&](int64_t i, int64_t first, int64_t last) {
          const ExpertRows& e = plan_.expert(plan_.item(i).expert);
          down_products(e, h_rows(e), first, last, [&](int64_t r, int64_t m, int64_t tile) {
            std::copy_n(pass_.space.scratch, m * kTileRows,
                        results_of(pool_, e, tile) + r * kTileRows);
          });
        });
    pass_.team_barrier();
  }

  // Every thread converts the whole rows of the experts whose tiles it computes. These rows are
  // few, and this saves a barrier.
  ActRows h_rows(const ExpertRows& e) {
    if (!h_.whole(e)) return h_.rows(e);
    const ActRows own = h_.own();
    for (int64_t row = 0; own_h_ != &e && row < e.count; ++row) h_.quantise(e, own, row);
    own_h_ = &e;
    return own;
  }

  // Contiguous over an expert's tiles, so that a thread writes one stream while it reads one of
  // weights. (With a stride between tiles, the writes took 8% of a decode step.)
  float* results_of(int pool, const ExpertRows& e, int64_t tile) const {
    const int64_t tiles = ceil_div(config_.hidden_size, kTileRows);
    return as<float>(pass_.work.results[size_t(pool)]) +
           (e.first * tiles + e.count * tile) * kTileRows;
  }

  void finish() {
    const int64_t tiles = ceil_div(config_.hidden_size, kTileRows);
    pass_.even_phase(Phase::kFinish, pass_.team(), tiles, 1, [&](int64_t first, int64_t last) {
      for (int64_t tile = first; tile < last; ++tile) {
        for (int p = 0; p < int(layer_.pools.size()); ++p)
          for (int64_t g = 0; layer_.pools[size_t(p)].size && g < plan_.groups(); ++g)
            sum_pairs(p, g, tile);
        finish_tile(layer_, plan_, chunk_, tile);
      }
    });
  }

  // Adds the results in the same order as prefill, which adds them as they are computed.
  void sum_pairs(int pool, int64_t group, int64_t tile) const {
    float* sum = new_sum(pool, group, tile);
    for (int64_t i = plan_.group(group).first; i < plan_.group(group).last; ++i) {
      const ExpertRows& e = plan_.expert(i);
      add_rows(pool, e, 0, e.count, tile, results_of(pool, e, tile), sum);
    }
  }

  const ExpertRows* own_h_ = nullptr;  // the expert whose whole rows this thread converted last
};

}  // namespace

void decode(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x) {
  Decode(pass, chunk, plan, x).run();
}

}  // namespace kt
