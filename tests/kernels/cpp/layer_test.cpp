// Tests passes over a layer whose team has reserves, for the thread sanitizer. Prints failures; the
// exit code is then 1.
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "layer_harness.h"
#include "moe/state.h"
#include "team_harness.h"

using kt::MoeLayer;
using kt::sys::PoolSpec;
using kt::sys::Team;

namespace {

constexpr int64_t kMaxTokens = 400;

std::shared_ptr<Team> make_team(std::vector<PoolSpec> pools) {
  return std::make_shared<Team>(std::move(pools));
}

// Both kinds of passes, in any order and queued, give the same bits as one thread.
void lean_and_full_passes() {
  // Lean: own plans, shared plans, and more than 512 ids of which fewer name an expert. Full: many
  // pairs, and two chunks, of which the second has few pairs.
  const std::vector<int64_t> tokens = {1, 3, 4, 5, 40, 300, 390, 401, 700};
  // The parts of I in two pools, and so the bits, depend on the ratio of the pools' threads.
  const std::vector<std::vector<PoolSpec>> shapes[] = {
      {{{1, -1}}, {{4, -1, 2}}, {{3, -1, 1}}},
      {{{1, -1}, {1, -1}}, {{3, -1, 1}, {3, -1, 2}}},
      {{{1, -1}, {2, -1}}, {{2, -1}, {4, -1, 3}}},
  };
  for (const auto& same_bits : shapes) {
    std::vector<Batch> batches;
    std::vector<std::vector<float>> expected;
    const auto alone = make_layer(make_team(same_bits[0]), 1, kMaxTokens);
    for (int64_t n : tokens) {
      batches.push_back(make_batch(unsigned(n), n));
      expected.push_back(by_hand(*alone, batches.back(), batches.back().ids));
    }
    for (size_t shape = 1; shape < same_bits.size(); ++shape) {
      const auto team = make_team(same_bits[shape]);
      const std::shared_ptr<MoeLayer> layers[] = {make_layer(team, 1, kMaxTokens),
                                                  make_layer(team, 1, kMaxTokens)};
      std::mt19937 random(static_cast<unsigned>(shape));
      for (int round = 0; round < 12; ++round) {
        std::vector<size_t> chosen;
        std::vector<std::vector<float>> out;
        for (int i = 0; i < 6; ++i) {
          chosen.push_back(random() % (random() % 3 ? 5 : tokens.size()));
          out.emplace_back(expected[chosen.back()].size());
        }
        std::shared_ptr<kt::sys::Job> last;
        for (size_t i = 0; i < chosen.size(); ++i) {
          const Batch& b = batches[chosen[i]];
          last = submit(*layers[random() % 2], b, b.ids, out[i].data());
          CHECK(last->lean() == (b.tokens < 390));
          if (random() % 4 == 0) last->wait();
        }
        last->wait();
        for (size_t i = 0; i < chosen.size(); ++i) CHECK(out[i] == expected[chosen[i]]);
      }
    }
  }
}

// Whether a pass is lean depends on the CPU's experts, which another thread changes meanwhile.
void moving_experts() {
  const auto layer = make_layer(make_team({{3, -1, 1}}), 1, kMaxTokens);
  const Batch b = make_batch(1, kMaxTokens);
  std::vector<float> y(b.x.size());
  const std::vector<uint8_t> all(size_t(kExperts), 1), some = {1, 0, 1, 0};
  layer->set_on_cpu(some);
  const std::vector<float> of_some = by_hand(*layer, b, b.ids);
  CHECK(submit(*layer, b, b.ids, y.data())->lean());
  layer->set_on_cpu(all);
  const std::vector<float> of_all = by_hand(*layer, b, b.ids);
  CHECK(!submit(*layer, b, b.ids, y.data())->lean());
  std::thread moving([&] {
    for (int i = 0; i < 40; ++i) layer->set_on_cpu(i % 2 ? all : some);
  });
  for (int i = 0; i < 20; ++i) {
    const std::vector<float> found = by_hand(*layer, b, b.ids);
    CHECK(found == of_some || found == of_all);
  }
  moving.join();
}

// Between two full passes, runs so many lean ones that the second's first phase has the number of
// the first's last phase. The reserve's tasks must not seem to be done.
void phase_numbers_come_again() {
  const auto layer = make_layer(make_team({{2, -1, 1}}), 1, kMaxTokens);
  const Batch one = make_batch(1, 1), before = make_batch(2, kMaxTokens),
              after = make_batch(3, kMaxTokens);
  const auto alone = make_layer(make_team({{1, -1}}), 1, kMaxTokens);
  by_hand(*layer, before, before.ids);
  const uint16_t& phase = layer->state()->workspace->phase;
  const uint16_t last = phase;
  by_hand(*layer, one, one.ids);
  const int phases = uint16_t(phase - last), passes = 65'535 / phases;
  std::vector<float> y(one.x.size());
  std::shared_ptr<kt::sys::Job> job;
  for (int pass = 1; pass < passes; ++pass) {
    job = submit(*layer, one, one.ids, y.data());
    if (pass % 500 == 0) job->wait();
  }
  job->wait();
  CHECK(uint16_t(phase + 1) == last);
  CHECK(by_hand(*layer, after, after.ids) == by_hand(*alone, after, after.ids));
}

}  // namespace

int main() {
  lean_and_full_passes();
  moving_experts();
  phase_numbers_come_again();
  return g_failures == 0 ? 0 : 1;
}
