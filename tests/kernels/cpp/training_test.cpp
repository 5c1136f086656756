// Tests of a layer in training, for the thread sanitizer. Prints what failed; exit code 1 then.
#include <atomic>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "layer_harness.h"
#include "moe/state.h"
#include "sft/layer.h"
#include "team_harness.h"

using kt::sys::PoolSpec;
using kt::sys::Team;

namespace {

constexpr int64_t kMaxTokens = 24, kRank = 8;

struct Arrays {
  int64_t tokens;
  std::vector<uint16_t> x, out, grad_out, grad_in;
  std::vector<float> weights, grad_weights;
  std::vector<int64_t> ids;
  std::vector<std::vector<float>> grads;

  Arrays(unsigned seed, int64_t n)
      : tokens(n),
        out(size_t(n * kHidden)),
        grad_in(out.size()),
        grad_weights(size_t(n * kTopK)),
        grads(6, std::vector<float>(size_t(kExperts * kRank * kInter))) {
    const Batch batch = make_batch(seed, n);
    std::mt19937 random(seed);
    for (int64_t i = 0; i < n * kHidden; ++i) {
      x.push_back(uint16_t(0x3f00 + random() % 256));
      grad_out.push_back(uint16_t(0xbf00 + random() % 256));
    }
    weights = batch.weights;
    ids = batch.ids;
  }
  kt::TrainingForwardArgs forward() {
    return {x.data(), ids.data(), weights.data(), out.data(), tokens, 1, true};
  }
  kt::TrainingBackwardArgs backward() {
    kt::TrainingBackwardArgs args{grad_out.data(), grad_in.data(), grad_weights.data(), {}};
    for (size_t m = 0; m < 3; ++m) {
      args.grads.a[m] = grads[2 * m].data();
      args.grads.b[m] = grads[2 * m + 1].data();
    }
    return args;
  }
};

struct Trained {
  std::shared_ptr<kt::MoeLayer> base;
  kt::TrainingLayer layer;

  explicit Trained(const std::shared_ptr<Team>& team)
      : base(make_layer(team, 1, kMaxTokens)),
        layer(team, base->state(), {kRank, 0.5f, 0.1f, 3, false, false, false}) {
    const std::vector<float> values(size_t(kExperts * kRank * kInter), 0.25f);
    kt::LoraSource source;
    for (size_t m = 0; m < 3; ++m) source.a[m] = source.b[m] = values.data();
    layer.update_lora(source);
  }
  void step(Arrays& arrays) {
    layer.forward(arrays.forward(), true);
    layer.backward(arrays.backward(), arrays.tokens);
  }
};

std::shared_ptr<Team> make_team(std::vector<PoolSpec> pools) {
  return std::make_shared<Team>(std::move(pools));
}

// Queued behind each other, in several chunks or without a token, and while slots change.
void queued_passes() {
  for (const auto& pools : std::vector<std::vector<PoolSpec>>{{{3, -1}}, {{2, -1, 1}, {2, -1}}}) {
    Trained one(make_team(pools));
    Arrays large(1, 60), expected(1, 60), small(2, 3), none(3, 0);
    one.step(expected);
    std::atomic<bool> stop{false};
    const std::vector<uint8_t> all(size_t(kExperts), 1), some = {1, 0, 1, 0};
    for (int round = 0; round < 8; ++round) {
      one.layer.submit_forward(large.forward(), true);
      one.layer.submit_forward(none.forward(), true);
      one.base->set_on_cpu(some);
      std::thread mover([&] { one.base->set_on_cpu(all); });
      const auto last = one.layer.submit_forward(none.forward(), false);
      one.layer.submit_forward(small.forward(), true);
      one.layer.drop_newest();
      one.layer.backward(none.backward(), 0);
      one.layer.backward(large.backward(), 60);
      last->wait();
      mover.join();
      CHECK(large.out == expected.out);
      CHECK(large.grad_in == expected.grad_in);
      CHECK(large.grads == expected.grads);
    }
  }
}

// Layers of one team, and one of another, in a thread each, with the memory of passes in common.
void layers_in_threads() {
  const auto team = make_team({{2, -1}});
  Trained layers[] = {Trained(team), Trained(team), Trained(make_team({{1, -1}, {1, -1}}))};
  std::vector<std::thread> threads;
  for (Trained& layer : layers)
    threads.emplace_back([&layer] {
      Arrays small(2, 3), large(1, 60);
      for (int round = 0; round < 8; ++round) {
        layer.step(round % 3 ? small : large);
        if (round % 5 == 0) layer.layer.clear();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  queued_passes();
  layers_in_threads();
  return g_failures == 0 ? 0 : 1;
}
