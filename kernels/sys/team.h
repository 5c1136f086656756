// A team of worker threads, one group ("pool") per NUMA node, and its queue of jobs.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "sys/fork.h"

namespace kt::sys {

struct PoolSpec {
  int threads;  // >= 0; a pool may have none only if it is given no work
  int node;     // NUMA node whose CPUs the threads may use; -1 or a missing node: any CPU
  // The number of threads, the last ones, that sit out lean jobs: fewer than `threads`, or none.
  // They sleep meanwhile, which leaves their CPUs to others.
  int reserves = 0;
};

constexpr int kMaxThreads = 4096;  // of a team
constexpr int kMaxNode = 65535;

// Threads that spin in addition to a team for whose jobs a GPU waits (Team::expect_until): the one
// that submits the jobs, and the one that waits for the results.
constexpr int kBesideTeam = 2;

class Crew;  // the threads and the queue of one process (team.cpp)

// A worker's numbers inside Job::run, and its barriers. A barrier spins for a limited time and then
// sleeps on a futex, so that having more threads than free CPUs does not stall the team.
class Worker {
 public:
  int pool;    // index of the pool
  int thread;  // within the team, counted pool by pool: the same in every job
  // Among the threads that run the job:
  int index;            // within the pool: also the same in every job
  int pool_threads;     // how many threads of this pool run it
  int rank;             // within the team, counted pool by pool
  int team_threads;     // how many threads run it
  void pool_barrier();  // waits for the threads of this pool that run the job
  void team_barrier();  // waits for all threads that run the job
 private:
  friend class Crew;
  Crew* crew_ = nullptr;
};

// A piece of work that every worker of the team runs once. A lean job is run by all workers except
// the reserves. run must not throw: everything that can fail (allocation, checks) must happen
// before submit. The team holds a reference until the job is done and drops it on a worker thread,
// so the destructor may run there.
class Job {
 public:
  virtual ~Job() = default;
  bool lean() const { return lean_; }
  virtual void run(Worker& worker) noexcept = 0;
  // Called once, by the last worker that leaves run, before the job counts as done. Sees what all
  // workers wrote.
  virtual void finished() noexcept {}
  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  // Spins briefly, then sleeps until the job is done. Throws std::runtime_error in a child of the
  // process that submitted it, where the job never finishes.
  void wait();

 protected:
  explicit Job(bool lean = false) : lean_(lean) {}

 private:
  friend class Crew;
  const bool lean_;
  static constexpr uint32_t kPending = 0, kDone = 1, kPendingWithSleepers = 2;
  std::atomic<uint32_t> state_{kPending};
  std::atomic<uint32_t> wait_spin_ns_{0};  // how long wait() spins; set by the team
  std::atomic<uint32_t> forks_{forks()};   // of the process that submitted it last
};

// Runs jobs one at a time in the order of submission, from any number of submitting threads. What
// one job wrote is visible to every worker of the next one. The workers take jobs from the queue
// themselves; there is no further thread. Threads start at the first submit. After fork(), the
// child starts its own threads at its first submit. Jobs that were pending at the fork are lost to
// it.
class Team {
 public:
  // Throws std::invalid_argument for a negative number of threads, for no threads or more than
  // kMaxThreads in the team, for reserves that leave a pool no other thread, and for node numbers
  // beyond kMaxNode.
  explicit Team(std::vector<PoolSpec> pools);
  // Finishes the jobs submitted so far, then stops the threads. May be called from any thread
  // except its own workers, which would wait for themselves (aborts).
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // May be called from inside a job. A finished job may be submitted again, a pending one may not.
  // Throws std::invalid_argument for a null job, and std::system_error if the threads cannot be
  // started; the job is then not queued, and a later submit tries again.
  void submit(std::shared_ptr<Job> job);

  // Until `time` (now_ns, sys/futex.h), the workers wait for the next job without sleeping, if a
  // CPU is left for the thread that submits it. Does nothing before the first submit. May be called
  // from any thread, including from inside a job.
  void expect_until(int64_t time) noexcept;
  int pools() const { return static_cast<int>(pools_.size()); }
  int threads(int pool) const { return pools_.at(static_cast<size_t>(pool)).threads; }
  int threads() const;
  int node(int pool) const { return pools_.at(static_cast<size_t>(pool)).node; }

 private:
  Crew& crew();

  const std::vector<PoolSpec> pools_;
  PerProcess process_{false};  // guards crew_
  Crew* crew_ = nullptr;       // owned; null until the first submit; in a child, the parent's
};

}  // namespace kt::sys
