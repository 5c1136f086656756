#include "drivers.h"
#include "phases.h"

namespace kt {
namespace {

// The tasks of down are (group of experts, tile). Each adds to its own tile of the group's sums,
// and the thread that completes the last group of a tile finishes the tile.
class Prefill : Phases {
 public:
  using Phases::Phases;
  void run() {
    gather(kRowTask);
    gate_up(1);
    quantise_h();
    down();
  }

 private:
  // Converts whole rows of h.
  void quantise_h() {
    if (!h_.any_whole(plan_)) return;
    const int64_t pairs = part().size ? plan_.pairs() : 0;
    pass_.even_phase(
        Phase::kQuantise, pass_.pool(), pairs, kRowTask, [&](int64_t first, int64_t last) {
          plan_.each_expert(first, last, [&](const ExpertRows& e, int64_t begin, int64_t end) {
            if (!h_.whole(e)) return;
            const ActRows to = h_.rows(e);
            for (int64_t pair = begin; pair < end; ++pair) h_.quantise(e, to, pair - e.first);
          });
        });
    pass_.pool_barrier();
  }

  // Tasks are (block of tiles, group, tile of the block): a thread with several groups of a tile
  // computes them one after the other, with their sums in its cache.
  void down() {
    const int64_t tiles = down_tiles();
    // A thread takes a whole block if possible, because its tiles share the reads of the h rows.
    const int64_t block =
        std::clamp<int64_t>(ceil_div(tiles, 2 * pass_.worker.pool_threads), 4, 16);
    const int64_t groups = plan_.groups();
    int sums = 0;
    for (const PoolPart& p : layer_.pools) sums += p.size ? int(groups) : 0;
    pass_.costed_phase(
        Phase::kDown, ceil_div(tiles, block) * groups, block,
        [&](int64_t i) { return plan_.group(i % groups).pairs; }, block,
        [&](int64_t i, int64_t begin, int64_t end) {
          const int64_t base = i / groups * block;
          const int64_t first = base + begin, last = std::min(base + end, tiles);
          down_of_group(i % groups, first, last);
          for (int64_t tile = first; tile < last; ++tile) sum_done(tile, sums);
        });
  }

  void down_of_group(int64_t group, int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) new_sum(pool_, group, tile);
    for (int64_t i = plan_.group(group).first; i < plan_.group(group).last; ++i) {
      const ExpertRows& e = plan_.expert(i);
      down_products(e, h_.rows(e), first, last, [&](int64_t r, int64_t m, int64_t tile) {
        add_rows(pool_, e, r, m, tile, pass_.space.scratch,
                 sum_of(layer_, plan_, chunk_, pool_, group, tile));
      });
    }
  }

  // The thread that completes the last sum of a tile finishes the tile while the sums are in a
  // cache.
  void sum_done(int64_t tile, int sums) {
    std::atomic<int>& done = pass_.work.sums_done[size_t(tile)];
    // acq_rel: the last thread sees the stores of the others. Nobody reads the counter again in
    // this chunk.
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != sums) return;
    done.store(0, std::memory_order_relaxed);
    finish_tile(layer_, plan_, chunk_, tile);
  }
};

}  // namespace

void prefill(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x) {
  Prefill(pass, chunk, plan, x).run();
}

}  // namespace kt
