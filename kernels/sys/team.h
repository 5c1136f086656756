// A team of worker threads, one group ("pool") per NUMA node, and the queue of jobs it runs.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "sys/fork.h"

namespace kt::sys {

struct PoolSpec {
  int threads;  // >= 0; a pool may have none only if it is given no work
  int node;     // NUMA node whose CPUs the threads may use; -1, or one that is not there: any
  // So many of the threads, the last ones, sit out lean jobs: fewer than `threads`, or none. They
  // sleep meanwhile, which leaves their CPUs to others.
  int reserves = 0;
};

constexpr int kMaxThreads = 4096;  // of a team
constexpr int kMaxNode = 65535;

// Threads that spin beside a team for whose jobs a GPU waits (Team::expect_until): who brings the
// jobs, and who waits for what comes of them.
constexpr int kBesideTeam = 2;

class Crew;  // the threads and the queue of one process (team.cpp)

// What a worker knows of itself inside Job::run, and its barriers. A barrier spins for a bounded
// time, then sleeps on a futex, so that more threads than free CPUs do not collapse.
class Worker {
 public:
  int pool;    // index of the pool
  int thread;  // within the team, counted pool by pool: the same in every job
  // Among the threads that run the job:
  int index;            // within the pool; the same in every job, too
  int pool_threads;     // how many of this pool run it
  int rank;             // within the team, counted pool by pool
  int team_threads;     // how many run it
  void pool_barrier();  // of those of this pool
  void team_barrier();  // of all that run the job
 private:
  friend class Crew;
  Crew* crew_ = nullptr;
};

// One piece of work that every worker of the team runs once; of a lean job, every one that is not a
// reserve. run must not throw: whatever can fail (allocation, checks) happens before submit. The
// team holds a reference until the job is done and drops it on a worker thread, so a destructor may
// run there.
class Job {
 public:
  virtual ~Job() = default;
  bool lean() const { return lean_; }
  virtual void run(Worker& worker) noexcept = 0;
  // Called once, by the last worker that leaves run, before the job counts as done: sees what all
  // workers wrote.
  virtual void finished() noexcept {}
  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  // Spins briefly, then sleeps until the job is done. Throws std::runtime_error
  // in a child of the process that submitted it, where nobody will finish it.
  void wait();

 protected:
  explicit Job(bool lean = false) : lean_(lean) {}

 private:
  friend class Crew;
  const bool lean_;
  static constexpr uint32_t kPending = 0, kDone = 1, kPendingWithSleepers = 2;
  std::atomic<uint32_t> state_{kPending};
  std::atomic<uint32_t> wait_spin_ns_{0};  // how long wait() spins; the team knows if CPUs are free
  std::atomic<uint32_t> forks_{forks()};   // of the process that submitted it last
};

// Jobs run one at a time in the order of submission, by any number of submitting threads: what
// one job wrote, every worker of the next one sees. The workers themselves take jobs from the
// queue: no further thread exists. Threads start at the first submit. After fork() the child starts
// its own at its first submit. The jobs that were pending at the fork are lost to it.
class Team {
 public:
  // Throws std::invalid_argument for a negative number of threads, none in the whole team or more
  // than kMaxThreads, for reserves that leave a pool no other thread, and for nodes that no machine
  // has.
  explicit Team(std::vector<PoolSpec> pools);
  // Finishes the jobs submitted so far, then stops the threads. From any thread but its own
  // workers, which would wait for themselves (aborts).
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Also from inside a job. A job that is done may be submitted again, a pending one may not.
  // Throws std::invalid_argument for a null job, std::system_error where the threads cannot be
  // started; the job is then not queued, and a later submit tries again.
  void submit(std::shared_ptr<Job> job);

  // Until `time` (now_ns, sys/futex.h) the workers wait for the next job without sleeping, where a
  // CPU is left for whoever submits it. Nothing before the first submit. From any thread, also from
  // inside a job.
  void expect_until(int64_t time) noexcept;
  int pools() const { return static_cast<int>(pools_.size()); }
  int threads(int pool) const { return pools_.at(static_cast<size_t>(pool)).threads; }
  int threads() const;
  int node(int pool) const { return pools_.at(static_cast<size_t>(pool)).node; }

 private:
  Crew& crew();

  const std::vector<PoolSpec> pools_;
  PerProcess process_{false};  // guards crew_
  Crew* crew_ = nullptr;       // owned; null until the first submit, a parent's until the child's
};

}  // namespace kt::sys
