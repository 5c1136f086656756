// Tests kernels/sys/team.h. Prints failures; the exit code is then 1. With names as arguments, runs
// only those tests. Built by test_sys.py, also with sanitizers: the threads deliberately write
// non-atomically, so that missing synchronisation is a data race.
#include "sys/team.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "sys/topology.h"
#include "team_harness.h"

using kt::sys::Job;
using kt::sys::PoolSpec;
using kt::sys::Team;
using kt::sys::Worker;
using namespace std::chrono_literals;

namespace {

const char* g_skipped = nullptr;  // why the running test did not run
void skipped(const char* why) { g_skipped = why; }

const std::vector<std::vector<PoolSpec>> kShapes = {
    {{1, -1}},
    {{2, -1}},
    {{3, 0}},
    {{7, -1}},
    {{16, -1}},
    {{2, 0}, {2, 1}},
    {{3, -1}, {0, -1}, {1, 0}, {5, 77}},
    {{0, 0}, {1, -1}},
    {{3, -1, 2}, {2, 0, 1}},
};

// Every worker runs every job once and knows its place.
void identity() {
  for (const auto& shape : kShapes) {
    Team team(shape);
    int total = 0;
    CHECK(team.pools() == static_cast<int>(shape.size()));
    for (size_t p = 0; p < shape.size(); ++p) {
      CHECK(team.threads(static_cast<int>(p)) == shape[p].threads);
      total += shape[p].threads;
    }
    CHECK(team.threads() == total);
    std::vector<int> runs(at(total));
    std::vector<std::pair<int, int>> places(at(total));
    for (int round = 1; round <= 3; ++round) {
      run(team, [&](Worker& w) {
        ++runs[at(w.rank)];
        places[at(w.rank)] = {w.pool, w.index};
        CHECK(w.team_threads == total);
        CHECK(w.pool_threads == shape[at(w.pool)].threads);
        CHECK(thread_name() == "kt-" + std::to_string(w.pool) + "." + std::to_string(w.index));
      });
      for (int r : runs) CHECK(r == round);
    }
    auto next = places.begin();
    for (size_t p = 0; p < shape.size(); ++p) {
      for (int i = 0; i < shape[p].threads; ++i) {
        CHECK(*next == std::make_pair(static_cast<int>(p), i));
        ++next;
      }
    }
  }
}

void bad_arguments() {
  const auto refused = [](std::vector<PoolSpec> pools) {
    try {
      Team team(pools);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(refused({}));
  CHECK(refused({{0, 0}, {0, -1}}));
  CHECK(refused({{2, 0}, {-1, 0}}));
  CHECK(refused({{2, 0, 2}}));
  CHECK(refused({{2, 0, -1}}));
  CHECK(refused({{2, 0}, {0, 0, 1}}));
  Team team({{1, -1}});
  try {
    team.submit(nullptr);
    CHECK(!"a null job was accepted");
  } catch (const std::invalid_argument&) {
  }
}

// A job sees what every worker wrote in the previous job, only through the order of submission.
void consecutive_jobs() {
  for (const auto& shape : kShapes) {
    Team team(shape);
    const int n = team.threads();
    std::vector<int> cells(at(n));
    std::shared_ptr<Job> last;
    const int rounds = 100;
    for (int round = 0; round < rounds; ++round) {
      team.submit(job([&cells, round](Worker&) {
        for (int cell : cells) CHECK(cell == round);
      }));
      last = job([&cells, round](Worker& w) { cells[at(w.rank)] = round + 1; });
      team.submit(last);
    }
    last->wait();
    for (int cell : cells) CHECK(cell == rounds);
  }
}

void barriers() {
  for (const auto& shape : kShapes) {
    Team team(shape);
    const int n = team.threads();
    std::vector<int> team_cells(at(n)), pool_cells(at(n));
    std::vector<int> first(shape.size());
    for (size_t p = 1; p < shape.size(); ++p) first[p] = first[p - 1] + shape[p - 1].threads;
    for (int repeat = 0; repeat < 3; ++repeat) {
      run(team, [&](Worker& w) {
        for (int round = 0; round < 50; ++round) {
          team_cells[at(w.rank)] = round;
          w.team_barrier();
          for (int cell : team_cells) CHECK(cell == round);
          w.team_barrier();
          for (int inner = 0; inner <= w.pool; ++inner) {  // pools need not agree on the number
            pool_cells[at(w.rank)] = 1000 * round + inner;
            w.pool_barrier();
            for (int i = 0; i < w.pool_threads; ++i) {
              CHECK(pool_cells[at(first[at(w.pool)] + i)] == 1000 * round + inner);
            }
            w.pool_barrier();
          }
        }
      });
    }
  }
}

// Each submitter's jobs run in its order, and all jobs run one at a time.
void many_submitters() {
  constexpr int kSubmitters = 4, kJobs = 150;
  std::mt19937 random(1);
  for (int threads : {1, 2, 3, 7, 16}) {
    Team team({{threads, -1}});
    std::vector<std::pair<int, int>> log;  // written by rank 0, read after the last job
    std::vector<int> inside(at(threads));
    std::vector<std::thread> submitters;
    for (int s = 0; s < kSubmitters; ++s) {
      const unsigned seed = static_cast<unsigned>(random());
      submitters.emplace_back([&, s, seed] {
        std::mt19937 own(seed);
        for (int k = 0; k < kJobs; ++k) {
          const auto j = job([&, s, k](Worker& w) {
            if (w.rank == 0) log.emplace_back(s, k);
            inside[at(w.rank)] = s * kJobs + k;
            w.team_barrier();
            for (int id : inside) CHECK(id == s * kJobs + k);
          });
          team.submit(j);
          if (own() % 4 == 0) j->wait();
          if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
        }
      });
    }
    for (auto& thread : submitters) thread.join();
    run(team, [](Worker&) {});
    CHECK(log.size() == kSubmitters * kJobs);
    std::vector<int> next(kSubmitters);
    for (const auto& [s, k] : log) CHECK(next[at(s)]++ == k);
  }
}

// Waiters that come before the submit, that spin, and that sleep through a long job.
void several_waiters() {
  Team team({{3, -1}});
  for (int round = 0; round < 20; ++round) {
    int value = 0;
    const auto j = job([&](Worker& w) {
      if (w.rank == 1) {
        if (round % 2) std::this_thread::sleep_for(2ms);
        value = round;
      }
    });
    std::vector<std::thread> waiters;
    for (int i = 0; i < 4; ++i) {
      waiters.emplace_back([&, i] {
        if (i % 2) std::this_thread::sleep_for(1ms);
        j->wait();
        CHECK(value == round);
      });
    }
    if (round % 3 == 0) std::this_thread::sleep_for(1ms);
    team.submit(j);
    for (auto& thread : waiters) thread.join();
    j->wait();  // once more, when done
  }
}

// Workers fall asleep between two jobs and in barriers, and wake up again.
void sleeping_workers() {
  Team team({{2, -1}, {3, -1}});
  for (int round = 0; round < 10; ++round) {
    std::this_thread::sleep_for(2ms);
    run(team, [&](Worker& w) {
      if (w.rank == round % 5) std::this_thread::sleep_for(2ms);
      w.pool_barrier();
      if (w.rank == (round + 2) % 5) std::this_thread::sleep_for(2ms);
      w.team_barrier();
    });
  }
}

void resubmit() {
  Team team({{3, -1}});
  int count = 0;
  const auto j = job([&](Worker& w) {
    if (w.rank == 2) ++count;
  });
  for (int round = 1; round <= 500; ++round) {
    team.submit(j);
    j->wait();
    CHECK(count == round);
  }
}

void submit_from_a_job() {
  int outer = 0, inner = 0;
  const auto second = job([&](Worker& w) {
    if (w.rank == 0) inner = outer + 1;
  });
  {
    Team team({{3, -1}});
    team.submit(job([&](Worker& w) {
      if (w.rank == 1) {
        std::this_thread::sleep_for(3ms);  // the destructor is waiting by now
        team.submit(second);
        outer = 1;
      }
    }));
  }
  CHECK(outer == 1);
  CHECK(inner == 2);
}

// The destructor finishes submitted jobs, and the jobs outlive the team.
void destroy_with_pending_jobs() {
  for (int threads : {1, 2, 7}) {
    for (bool elsewhere : {false, true}) {
      auto team = std::make_unique<Team>(std::vector<PoolSpec>{{threads, -1}});
      std::vector<int> runs(at(threads));
      std::vector<std::shared_ptr<Job>> jobs;
      for (int i = 0; i < 50; ++i) {
        jobs.push_back(job([&, i](Worker& w) {
          if (i == 0) std::this_thread::sleep_for(2ms);
          ++runs[at(w.rank)];
        }));
        team->submit(jobs.back());
      }
      if (elsewhere) {
        std::thread([&] { team.reset(); }).join();
      } else {
        team.reset();
      }
      for (const auto& j : jobs) CHECK(j->done());
      for (int r : runs) CHECK(r == 50);
      for (const auto& j : jobs) CHECK(j.use_count() == 1);
    }
  }
  Team never_used({{4, -1}});
}

// The thread that sees the job done may destroy the team at once, and so may the next one.
void destroy_right_after_wait() {
  for (int round = 0; round < 100; ++round) {
    auto team = std::make_unique<Team>(std::vector<PoolSpec>{{1 + round % 4, -1}});
    auto j = job([](Worker&) {});
    team->submit(j);
    j->wait();
    j.reset();
    team.reset();
  }
}

void signals_and_affinity() {
  const std::vector<int> allowed = kt::sys::allowed_cpus();
  const std::vector<kt::sys::Node> nodes = kt::sys::topology();
  std::vector<int> node_cpus = nodes[0].cpus;
  std::sort(node_cpus.begin(), node_cpus.end());
  Team team({{2, nodes[0].id}, {2, 9999}, {1, -1}});
  run(team, [&](Worker& w) {
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    CHECK(sigismember(&blocked, SIGINT) == 1);
    CHECK(sigismember(&blocked, SIGTERM) == 1);
    CHECK(sigismember(&blocked, SIGSEGV) == 0);
    CHECK(kt::sys::allowed_cpus() == (w.pool == 0 ? node_cpus : allowed));
  });
  sigset_t here;
  pthread_sigmask(SIG_BLOCK, nullptr, &here);
  CHECK(sigismember(&here, SIGINT) == 0);

  // A simulated node, of which one part exists; and a node whose CPUs do not exist.
  setenv("KT_TOPOLOGY", ("0:60000;1:60001," + std::to_string(allowed.back())).c_str(), 1);
  {
    Team simulated({{1, 0}, {2, 1}});
    run(simulated, [&](Worker& w) {
      CHECK(kt::sys::allowed_cpus() == (w.pool == 0 ? allowed : std::vector<int>{allowed.back()}));
    });
  }
  setenv("KT_TOPOLOGY", "nonsense", 1);
  Team broken({{1, 0}});
  const auto j = job([](Worker&) {});
  try {
    broken.submit(j);
    CHECK(!"a malformed KT_TOPOLOGY was accepted");
  } catch (const std::invalid_argument&) {
  }
  CHECK(j.use_count() == 1);
  unsetenv("KT_TOPOLOGY");
  broken.submit(j);  // and it recovers
  j->wait();
}

// Runs f in a forked child. Returns its exit code, or -1 if it hung or was killed.
int in_child(const std::function<int()>& f) {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    const int code = f();
    std::fflush(stdout);
    _exit(code);
  }
  CHECK(pid > 0);
  for (int i = 0; i < 2000; ++i) {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::this_thread::sleep_for(5ms);
  }
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return -1;
}

constexpr const char* kNoForkOfThreads =
    "after a fork the thread sanitizer takes new threads for the parent's (\"dup thread\")";

int use_in_child(Team& team) {
  std::vector<int> cells(at(team.threads()));
  std::vector<std::thread> submitters;  // the first submits of the child at the same time
  for (int s = 0; s < 2; ++s) {
    submitters.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        run(team, [&](Worker& w) {
          ++cells[at(w.rank)];
          w.team_barrier();
        });
      }
    });
  }
  for (auto& thread : submitters) thread.join();
  for (int cell : cells) CHECK(cell == 20);
  return g_failures == 0 ? 7 : 8;
}

// Two children of a process whose team never ran.
void fork_unused() {
  Team unused({{2, 0}, {1, -1}});
  CHECK(in_child([&] { return use_in_child(unused); }) == 7);
  CHECK(in_child([&] { return use_in_child(unused); }) == 7);
}

void fork_and_submit() {
  if (kThreadSanitizer) return skipped(kNoForkOfThreads);
  const std::vector<PoolSpec> shape = {{3, 0, 1}, {1, -1}};
  auto team = std::make_unique<Team>(shape);
  run(*team, [](Worker&) {});
  CHECK(in_child([&] { return use_in_child(*team); }) == 7);
  CHECK(in_child([&] {
          team.reset();  // never submitted here
          return 7;
        }) == 7);
  CHECK(in_child([&] {  // used and destroyed; then a new one; then a grandchild
          use_in_child(*team);
          const int grandchild = in_child([&] { return use_in_child(*team); });
          team.reset();
          Team fresh(shape);
          return grandchild == 7 ? use_in_child(fresh) : 9;
        }) == 7);
  run(*team, [](Worker&) {});  // the parent is not affected
}

// Forks at arbitrary moments of submits, when the queue's mutex is sometimes held.
void fork_under_load() {
  // GCC 12's address sanitizer cannot handle a fork while another thread is in its allocator.
  if (kSanitizer) return skipped("a sanitizer's own lock may be held at the fork");
  Team team({{2, -1}});
  std::atomic<bool> stop{false};
  std::vector<std::thread> submitters;
  for (int s = 0; s < 2; ++s) {
    submitters.emplace_back([&] {
      while (!stop) run(team, [](Worker& w) { w.team_barrier(); });
    });
  }
  for (int i = 0; i < 20; ++i) {
    CHECK(in_child([&] { return use_in_child(team); }) == 7);
  }
  stop = true;
  for (auto& thread : submitters) thread.join();
}

size_t virtual_bytes() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void thread_creation_fails() {
  if (kSanitizer) return skipped("a sanitizer needs the address space");
  // In a child, whose limits may stay changed: memory for the stacks of some threads, not of all.
  const int code = in_child([] {
    constexpr int kThreads = 64;
    Team team({{kThreads, -1}});
    const auto j = job([](Worker& w) { w.team_barrier(); });
    rlimit before{};
    getrlimit(RLIMIT_AS, &before);
    const rlimit tight{virtual_bytes() + (size_t{100} << 20), before.rlim_max};
    setrlimit(RLIMIT_AS, &tight);
    bool named = false;
    try {
      team.submit(j);
    } catch (const std::system_error& error) {
      named = std::strstr(error.what(), "64 threads") != nullptr &&
              error.code() == std::errc::resource_unavailable_try_again;
      if (!named) std::puts(error.what());
    }
    CHECK(named);
    CHECK(j.use_count() == 1);
    setrlimit(RLIMIT_AS, &before);
    team.submit(j);  // with enough memory again, it starts
    j->wait();
    return g_failures == 0 ? 0 : 1;
  });
  CHECK(code == 0);
}

// Far more threads than CPUs, and an unrelated busy process: the jobs only have to finish.
void oversubscription() {
  std::atomic<bool> stop{false};
  std::thread stranger([&] {
    while (!stop) {
    }
  });
  Team team({{8, -1}, {8, 0}});
  const auto start = std::chrono::steady_clock::now();
  int count = 0;
  for (int i = 0; i < 100; ++i) {
    run(team, [&](Worker& w) {
      w.pool_barrier();
      if (w.rank == 15) ++count;
      w.team_barrier();
    });
  }
  CHECK(count == 100);
  const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
  std::printf("oversubscription: %.0f us for a job of 16 threads and 2 barriers\n",
              time.count() / 100);
  stop = true;
  stranger.join();
}

constexpr std::pair<const char*, void (*)()> kTests[] = {
    {"identity", identity},
    {"bad_arguments", bad_arguments},
    {"consecutive_jobs", consecutive_jobs},
    {"barriers", barriers},
    {"many_submitters", many_submitters},
    {"several_waiters", several_waiters},
    {"sleeping_workers", sleeping_workers},
    {"resubmit", resubmit},
    {"submit_from_a_job", submit_from_a_job},
    {"destroy_with_pending_jobs", destroy_with_pending_jobs},
    {"destroy_right_after_wait", destroy_right_after_wait},
    {"signals_and_affinity", signals_and_affinity},
    {"fork_unused", fork_unused},
    {"fork_and_submit", fork_and_submit},
    {"fork_under_load", fork_under_load},
    {"thread_creation_fails", thread_creation_fails},
    {"oversubscription", oversubscription},
};

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (const auto& [name, test] : kTests) {
    const auto is_name = [n = name](const char* argument) { return std::strcmp(argument, n) == 0; };
    if (argc > 1 && std::none_of(argv + 1, argv + argc, is_name)) continue;
    const auto start = std::chrono::steady_clock::now();
    const int before = g_failures;
    g_skipped = nullptr;
    test();
    if (g_skipped) {
      std::printf("skip   %s: %s\n", name, g_skipped);
      continue;
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    std::printf("%s %s (%.2f s)\n", g_failures == before ? "ok    " : "FAILED", name, time.count());
  }
  return g_failures == 0 ? 0 : 1;
}
