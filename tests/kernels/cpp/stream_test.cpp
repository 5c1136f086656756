// Tests kernels/stream without a GPU and without Python, for the thread sanitizer: a thread plays
// the GPU while others use the engine. Prints failures; the exit code is then 1.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "layer_harness.h"
#include "stream/engine.h"
#include "stream/split.h"
#include "team_harness.h"

using kt::MoeLayer;
using kt::StreamEngine;
using kt::StreamSide;
using namespace std::chrono_literals;

namespace {

constexpr int64_t kCapacity = 8, kEntries = 16;

Batch make_batch(unsigned seed) { return ::make_batch(seed, 1 + int64_t(seed % kCapacity)); }

std::shared_ptr<MoeLayer> make_layer(const std::shared_ptr<kt::sys::Team>& team, unsigned seed) {
  return ::make_layer(team, seed, kCapacity);
}

std::shared_ptr<StreamSide> make_side() {
  return std::make_shared<StreamSide>(kCapacity, kHidden, kTopK, kt::DType::kFP32, true);
}

// One stream of a GPU, used by one thread at a time.
class Gpu {
 public:
  explicit Gpu(StreamEngine& engine) : engine_(engine) {}

  // The kernel before the layer.
  uint32_t hand_over(int64_t slot, StreamSide& side, const Batch& b) {
    std::atomic_ref(*side.ready()).store(0, std::memory_order_relaxed);
    std::atomic_ref(*side.tokens()).store(int32_t(b.tokens), std::memory_order_relaxed);
    std::copy(b.x.begin(), b.x.end(), static_cast<float*>(side.x()));
    std::copy(b.ids.begin(), b.ids.end(), side.ids());
    std::copy(b.weights.begin(), b.weights.end(), side.weights());
    return ring(slot);
  }

  uint32_t ring(int64_t slot) {
    ++number_;
    while (number_ - std::atomic_ref(*engine_.head()).load(std::memory_order_acquire) > kEntries)
      std::this_thread::yield();
    std::atomic_ref(engine_.ring()[number_ & (kEntries - 1)])
        .store(uint64_t(slot) << 32 | number_, std::memory_order_release);
    return number_;
  }

  // The kernel after the layer.
  void wait(const StreamSide& side, uint32_t number) const {
    while (std::atomic_ref(*side.done()).load(std::memory_order_acquire) != number)
      std::this_thread::yield();
  }

  std::vector<float> result(const StreamSide& side, uint32_t number, const Batch& b) const {
    wait(side, number);
    const float* out = static_cast<const float*>(side.out());
    return {out, out + b.x.size()};
  }

 private:
  StreamEngine& engine_;
  uint32_t number_ = 0;
};

// The engine's error, "" if there is none.
std::string error_of(StreamEngine& engine) {
  try {
    engine.raise_error();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// A job that lasts until it is told to end. Its team does nothing else meanwhile.
class Blocked {
 public:
  explicit Blocked(kt::sys::Team& team)
      : job_(job([this](kt::sys::Worker&) {
          while (!go_on_.load(std::memory_order_acquire)) std::this_thread::sleep_for(100us);
        })) {
    team.submit(job_);
  }
  ~Blocked() { end(); }
  void end() {
    go_on_.store(true, std::memory_order_release);
    job_->wait();
  }

 private:
  std::atomic<bool> go_on_{false};
  std::shared_ptr<kt::sys::Job> job_;
};

// Two concurrent streams through layers of one team, each a chain whose first layer defers, while
// other threads query and change whatever they may.
void streams() {
  const auto team = std::make_shared<kt::sys::Team>(std::vector<kt::sys::PoolSpec>{{2, -1}});
  const std::array layers{make_layer(team, 1), make_layer(team, 2)};
  constexpr unsigned kBatches = 8;
  struct Expected {
    Batch batch;
    std::array<std::vector<float>, 2> out;
  };
  std::vector<Expected> expected;
  for (unsigned seed = 0; seed < kBatches; ++seed) {
    const Batch b = make_batch(seed);
    std::vector<int64_t> now = b.ids, later(b.ids.size());
    kt::DeferredSplit(kExperts, kTopK).run(b.weights.data(), b.tokens, 1, now.data(), later.data());
    const std::vector<float> carried = by_hand(*layers[0], b, later);
    expected.push_back(
        {b, {by_hand(*layers[0], b, now), by_hand(*layers[1], b, b.ids, carried.data())}});
  }

  std::vector<std::unique_ptr<StreamEngine>> engines;
  for (const bool traces : {false, true})
    engines.push_back(std::make_unique<StreamEngine>(kEntries, 60.0, 0, traces));
  std::atomic<int> streaming{2};
  const auto stream = [&](StreamEngine& engine) {
    const std::array sides{make_side(), make_side()};
    std::array<int64_t, 2> slots;
    for (int i = 0; i < 2; ++i)
      slots[size_t(i)] = engine.add_slot(layers[size_t(i)], "layer " + std::to_string(i),
                                         sides[size_t(i)], 0, i, i ? kTopK : 1);
    Gpu gpu(engine);
    for (int round = 0; round < 150; ++round) {
      const Expected& e = expected[size_t(round) % kBatches];
      for (size_t i = 0; i < 2; ++i) {
        if (round % 3) engine.wake();
        const uint32_t number = gpu.hand_over(slots[i], *sides[i], e.batch);
        CHECK(gpu.result(*sides[i], number, e.batch) == e.out[i]);
      }
    }
    CHECK(engine.drain(60));
    CHECK(engine.entries_of(slots[1]) == 150 && engine.pending() == 0);
    CHECK(error_of(engine).empty());
    --streaming;
  };
  const auto ask = [&](StreamEngine& engine) {
    while (streaming) {
      engine.stats();
      engine.pending();
      engine.take_trace();
      engine.drain(0.0001);
      // A layer that is created and dropped, like one of another model.
      const int64_t slot = engine.add_slot(make_layer(team, 3), "other", make_side(), 1, 0, kTopK);
      engine.entries_of(slot);
      engine.entries_of(0);
      engine.drop_slot(slot, true);
    }
  };
  std::vector<std::thread> threads;
  for (auto& engine : engines) {
    threads.emplace_back(stream, std::ref(*engine));
    threads.emplace_back(ask, std::ref(*engine));
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& engine : engines) engine->stop();
  CHECK(!engines[1]->take_trace().empty() && engines[0]->take_trace().empty());
}

// A layer that is dropped while the GPU calls it gives a result, or zeros and an error.
void dropped_slots() {
  const auto team = std::make_shared<kt::sys::Team>(std::vector<kt::sys::PoolSpec>{{2, -1}});
  StreamEngine engine(kEntries, 60.0, 0, false);
  Gpu gpu(engine);
  const auto side = make_side();
  const Batch batch = make_batch(5);
  const std::vector<float> zeros(batch.x.size());
  for (unsigned round = 0; round < 30; ++round) {
    auto layer = make_layer(team, round);
    const std::vector<float> expected = by_hand(*layer, batch, batch.ids);
    const int64_t slot = engine.add_slot(std::move(layer), "layer", side, 0, 0, kTopK);
    std::thread dropping([&] { engine.drop_slot(slot); });
    bool gone = false;
    for (int call = 0; call < 6; ++call) {
      const auto y = gpu.result(*side, gpu.hand_over(slot, *side, batch), batch);
      gone = gone || y == zeros;
      CHECK(y == (gone ? zeros : expected));
    }
    dropping.join();
    const auto y = gpu.result(*side, gpu.hand_over(slot, *side, batch), batch);
    CHECK(y == zeros);
    CHECK(contains(error_of(engine), "was freed, but a CUDA graph still calls it"));
    CHECK(error_of(engine).empty());
  }
}

// Invalid entries, while several threads query errors: each error is raised once.
void errors() {
  const auto team = std::make_shared<kt::sys::Team>(std::vector<kt::sys::PoolSpec>{{1, -1}});
  StreamEngine engine(kEntries, 60.0, 0, false);
  const auto side = make_side();
  const int64_t slot = engine.add_slot(make_layer(team, 1), "layer", side, 0, 0, kTopK);
  Gpu gpu(engine);
  std::atomic<int> raised{0};
  std::atomic<bool> ringing{true};
  std::vector<std::thread> asking;
  for (int i = 0; i < 3; ++i) {
    asking.emplace_back([&] {
      while (ringing) raised += !error_of(engine).empty();
    });
  }
  Batch batch = make_batch(1);
  for (int round = 0; round < 20; ++round) {
    gpu.ring(slot + 1);
    batch.tokens = round % 2 ? kCapacity + 1 : 0;
    gpu.wait(*side, gpu.hand_over(slot, *side, batch));
  }
  CHECK(engine.drain(60));
  ringing = false;
  for (std::thread& thread : asking) thread.join();
  raised += !error_of(engine).empty();
  CHECK(raised >= 1 && raised <= 40 && engine.stats()["errors"] == 40);
}

// The GPU continues if a layer's threads are busy for too long, and the late result does no harm.
void watchdog() {
  const auto team = std::make_shared<kt::sys::Team>(std::vector<kt::sys::PoolSpec>{{2, -1}});
  StreamEngine engine(kEntries, 0.05, 0, true);
  const auto layer = make_layer(team, 1);
  const auto late = make_side(), next = make_side();
  const int64_t slots[] = {engine.add_slot(layer, "late", late, 0, 0, kTopK),
                           engine.add_slot(layer, "next", next, 1, 0, kTopK)};
  const Batch batch = make_batch(2);
  const std::vector<float> expected = by_hand(*layer, batch, batch.ids);
  Gpu gpu(engine);
  for (int round = 0; round < 3; ++round) {
    {
      Blocked blocked(*team);
      gpu.wait(*late, gpu.hand_over(slots[0], *late, batch));
      CHECK(contains(error_of(engine), "late: no result for"));
    }
    CHECK(engine.drain(60));
    const uint32_t number = gpu.hand_over(slots[1], *next, batch);
    gpu.wait(*next, number);
    // A slow machine may take too long for this one, too, and still be writing its result.
    if (error_of(engine).empty()) CHECK(gpu.result(*next, number, batch) == expected);
  }
  // For the second, only the done word is checked, because its memory is in use.
  Blocked blocked(*team);
  const uint32_t first = gpu.hand_over(slots[0], *late, batch), second = gpu.ring(slots[0]);
  gpu.wait(*late, second);
  blocked.end();
  CHECK(second == first + 1 && engine.drain(60));
  CHECK(engine.stats()["watchdog"] >= 5);
}

// stop(), called by several threads while others use the engine, answers everything that was rung.
void stopping() {
  const auto team = std::make_shared<kt::sys::Team>(std::vector<kt::sys::PoolSpec>{{2, -1}});
  const auto layer = make_layer(team, 1);
  const Batch batch = make_batch(4);
  const std::vector<float> expected = by_hand(*layer, batch, batch.ids);
  for (int round = 0; round < 20; ++round) {
    StreamEngine engine(kEntries, 60.0, 0, round % 2);
    Gpu gpu(engine);
    std::vector<std::shared_ptr<StreamSide>> sides;
    std::vector<uint32_t> numbers;
    std::vector<int64_t> finished;  // slots that nothing rings any more
    for (int i = 0; i < 3; ++i) {
      const auto side = make_side();
      finished.push_back(engine.add_slot(layer, "finished", side, 20 + i, 0, kTopK));
      gpu.wait(*side, gpu.hand_over(finished.back(), *side, batch));
    }
    for (int i = 0; i < 6; ++i) {
      sides.push_back(make_side());
      const int64_t slot = engine.add_slot(layer, "layer", sides.back(), i, 0, kTopK);
      numbers.push_back(gpu.hand_over(slot, *sides.back(), batch));
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        engine.stop();
        CHECK(engine.pending() == 0);
      });
      threads.emplace_back([&, i] {
        try {
          engine.drop_slot(engine.add_slot(layer, "late", make_side(), 9 + i, 0, kTopK), true);
        } catch (const std::runtime_error& error) {
          CHECK(contains(error.what(), "was stopped"));
        }
        engine.drop_slot(finished[size_t(i)], true);
        engine.drain(0.001);
        engine.take_trace();
        engine.wake();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < sides.size(); ++i)
      CHECK(gpu.result(*sides[i], numbers[i], batch) == expected);
    CHECK(contains(error_of(engine), "was stopped"));
  }
}

// An engine ends before its job has begun. The job runs later, in memory that it owns.
void end_with_work_pending() {
  const auto team = std::make_shared<kt::sys::Team>(std::vector<kt::sys::PoolSpec>{{2, -1}});
  auto layer = make_layer(team, 1);
  Blocked blocked(*team);
  StreamEngine engine(kEntries, 0.02, 0, true);
  const auto side = make_side();
  Gpu(engine).hand_over(engine.add_slot(layer, "layer", side, 0, 0, 1), *side, make_batch(3));
  layer.reset();
}

constexpr std::pair<const char*, void (*)()> kTests[] = {
    {"streams", streams},   {"dropped_slots", dropped_slots},
    {"errors", errors},     {"watchdog", watchdog},
    {"stopping", stopping}, {"end_with_work_pending", end_with_work_pending},
};

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (const auto& [name, test] : kTests) {
    const auto start = std::chrono::steady_clock::now();
    const int before = g_failures;
    test();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    std::printf("%s %s (%.2f s)\n", g_failures == before ? "ok    " : "FAILED", name, time.count());
  }
  return g_failures == 0 ? 0 : 1;
}
