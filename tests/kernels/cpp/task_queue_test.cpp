// Tests kernels/sys/task_queue.h. Prints failures; the exit code is then 1. Built by test_sys.py,
// also with sanitizers: tasks deliberately write non-atomically, so that a task given to two
// threads, or overlapping phases, are data races.
#include "sys/task_queue.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "sys/team.h"
#include "team_harness.h"

using kt::sys::PoolSpec;
using kt::sys::Team;
using kt::sys::Worker;

namespace {

const std::vector<std::vector<PoolSpec>> kShapes = {
    {{1, -1}}, {{2, -1}}, {{3, -1}}, {{7, -1}}, {{2, -1}, {0, -1}, {3, -1}}};

// Shares follow the costs: within one task of the ideal bound, with all tasks once and in order.
void task_split() {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const int threads = 1 + static_cast<int>(random() % 9);
    std::vector<std::pair<int64_t, int64_t>> segments(random() % 6);
    int64_t total = 0, tasks = 0;
    for (auto& [count, cost] : segments) {
      count = 1 + random() % 20;
      cost = 1 + random() % 50;
      total += count * cost;
      tasks += count;
    }
    std::vector<int64_t> starts(at(threads) + 1, -1);
    kt::sys::TaskSplit split(total, threads, starts.data());
    for (const auto& [count, cost] : segments) split.add(count, cost);
    split.end();
    CHECK(starts.front() == 0 && starts.back() == tasks);
    CHECK(std::is_sorted(starts.begin(), starts.end()));
    for (int i = 1; i < threads; ++i) {
      int64_t before = 0, left = starts[at(i)], last = 0;  // cost of the tasks before the start
      for (const auto& [count, cost] : segments) {
        const int64_t n = std::min(left, count);
        before += n * cost;
        left -= n;
        if (n) last = cost;
      }
      const int64_t bound = total * i / threads;
      CHECK(before >= bound && (before == 0 || before - last < bound));
    }
  }
}

// Every task of every phase runs once, by any thread, and a phase sees what the previous one wrote.
// There are enough phases for their number to wrap, and thieves that arrive before the owner.
void task_phases() {
  for (const auto& shape : kShapes) {
    Team team(shape);
    const int n = team.threads();
    std::vector<kt::sys::TaskSlot> slots(at(n));
    constexpr int kTasks = 61;
    std::vector<int> cells(kTasks);
    std::atomic<int64_t> stolen{0};
    const int phases = kSanitizer ? 300 : 70'000 / (n * n);
    run(team, [&](Worker& w) {
      std::vector<int64_t> starts(at(n) + 1);
      for (int phase = 0; phase < phases; ++phase) {
        for (int i = 0; i <= n; ++i) {  // uneven, and some threads have none
          starts[at(i)] = phase % 3 ? kTasks * i / n : i == 0 ? 0 : kTasks;
        }
        kt::sys::TaskPhase tasks(slots.data(), n, w.rank, static_cast<uint16_t>(phase + 65'000),
                                 starts.data());
        for (kt::sys::TaskRange r; !(r = tasks.claim(1 + phase % 5)).empty();) {
          for (int64_t task = r.first; task < r.last; ++task) {
            CHECK(cells[static_cast<size_t>(task)] == phase);
            cells[static_cast<size_t>(task)] = phase + 1;
          }
        }
        stolen += tasks.stolen();
        w.team_barrier();
      }
    });
    for (int cell : cells) CHECK(cell == phases);
    CHECK(n > 1 || stolen == 0);
  }
}

// A delayed thread does only the tasks that it has taken; the others do the rest of its tasks.
void slow_thread() {
  Team team({{3, -1}});
  std::vector<kt::sys::TaskSlot> slots(3);
  const std::vector<int64_t> starts = {0, 10, 20, 30};
  std::vector<int> by(30, -1);
  std::atomic<int> done{0};
  std::atomic<bool> held_up{false};
  run(team, [&](Worker& w) {
    kt::sys::TaskPhase tasks(slots.data(), 3, w.rank, 1, starts.data());
    while (w.rank != 1 && !held_up) std::this_thread::yield();
    for (kt::sys::TaskRange r; !(r = tasks.claim(1)).empty();) {
      by[static_cast<size_t>(r.first)] = w.rank;
      ++done;
      if (w.rank == 1) {
        held_up = true;
        while (done < 30) std::this_thread::yield();
      }
    }
  });
  CHECK(std::count(by.begin(), by.end(), 1) == 1);
  CHECK(std::count(by.begin(), by.end(), -1) == 0);
}

}  // namespace

int main() {
  task_split();
  task_phases();
  slow_thread();
  return g_failures == 0 ? 0 : 1;
}
