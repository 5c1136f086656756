// Tests teams with reserves (kernels/sys/team.h). Prints failures; the exit code is then 1. The
// threads deliberately write non-atomically, so that missing synchronisation is a data race.
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sys/futex.h"
#include "sys/team.h"
#include "team_harness.h"

using kt::sys::Job;
using kt::sys::PoolSpec;
using kt::sys::Team;
using kt::sys::Worker;
using namespace std::chrono_literals;

namespace {

const std::vector<std::vector<PoolSpec>> kShapes = {
    {{2, -1, 1}}, {{5, -1, 4}}, {{3, -1, 1}, {2, -1, 1}}, {{4, 0, 2}, {0, -1}, {1, -1}, {3, -1, 1}},
    {{3, -1}},  // no reserves: a lean job is like any other
};

// By number of the thread in the team: whether it is a reserve.
std::vector<bool> reserves_of(const std::vector<PoolSpec>& shape) {
  std::vector<bool> found;
  for (const PoolSpec& pool : shape)
    for (int i = 0; i < pool.threads; ++i) found.push_back(i >= pool.threads - pool.reserves);
  return found;
}

// Every thread runs every full job, all except the reserves run lean jobs, and each knows its
// place.
void places() {
  for (const auto& shape : kShapes) {
    Team team(shape);
    const std::vector<bool> reserve = reserves_of(shape);
    for (int round = 0; round < 6; ++round) {
      const bool lean = round % 3 != 0;
      std::vector<std::pair<int, int>> expected;  // by rank: the pool and the index in it
      std::vector<int> first, here;               // by pool: threads of the team, and in the job
      int threads = 0;
      for (size_t p = 0; p < shape.size(); ++p) {
        first.push_back(threads);
        threads += shape[p].threads;
        here.push_back(shape[p].threads - (lean ? shape[p].reserves : 0));
        for (int i = 0; i < here.back(); ++i) expected.emplace_back(static_cast<int>(p), i);
      }
      std::vector<std::pair<int, int>> found(expected.size());
      run(
          team,
          [&](Worker& w) {
            found[at(w.rank)] = {w.pool, w.index};
            CHECK(w.team_threads == static_cast<int>(expected.size()));
            CHECK(w.pool_threads == here[at(w.pool)]);
            CHECK(w.thread == first[at(w.pool)] + w.index);
            CHECK(!lean || !reserve[at(w.thread)]);
            CHECK(thread_name() == "kt-" + std::to_string(w.pool) + "." + std::to_string(w.index));
          },
          lean);
      CHECK(found == expected);
    }
  }
}

// Lean and full jobs in any order, queued or one by one. Each job sees what all threads wrote in
// earlier jobs, a reserve also sees what was written while it slept, and so after barriers.
void mixed_jobs() {
  for (const auto& shape : kShapes) {
    Team team(shape);
    const std::vector<bool> reserve = reserves_of(shape);
    std::vector<int> cells(reserve.size()), expected(reserve.size());
    std::mt19937 random(7);
    std::shared_ptr<Job> last;
    for (int round = 1; round <= 400; ++round) {
      const bool lean = random() % 4 != 0;
      const std::vector<int> before = expected;
      for (size_t i = 0; i < expected.size(); ++i)
        if (!lean || !reserve[i]) expected[i] = round;
      last = job(
          [&cells, before, after = expected, round](Worker& w) {
            CHECK(cells == before);
            w.team_barrier();
            cells[at(w.thread)] = round;
            w.pool_barrier();
            for (int i = w.thread - w.index; i < w.thread - w.index + w.pool_threads; ++i)
              CHECK(cells[at(i)] == round);
            w.team_barrier();
            CHECK(cells == after);
            w.team_barrier();
          },
          lean);
      team.submit(last);
      if (random() % 8 == 0) last->wait();
      if (random() % 32 == 0) {  // all fall asleep, or wait without sleeping
        team.expect_until(kt::sys::now_ns() + int64_t(random() % 2) * 2'000'000);
        std::this_thread::sleep_for(1ms);
      }
    }
    last->wait();
    CHECK(cells == expected);
  }
}

// A team ends while its reserves sleep, have never run, or are in a job.
void endings() {
  for (int round = 0; round < 60; ++round) {
    Team team({{1 + round % 3, -1, round % 3}, {2, -1, 1}});
    for (int i = 0; i < round % 4; ++i) {
      team.submit(job([](Worker& w) { w.team_barrier(); }, (round + i) % 5 != 0));
      if (round % 2) std::this_thread::sleep_for(100us);
    }
  }
}

}  // namespace

int main() {
  places();
  mixed_jobs();
  endings();
  return g_failures == 0 ? 0 : 1;
}
