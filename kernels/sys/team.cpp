#include "sys/team.h"

#include <pthread.h>
#include <sched.h>
#include <xmmintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "sys/crowding.h"
#include "sys/fork.h"
#include "sys/futex.h"
#include "sys/need.h"
#include "sys/signals.h"
#include "sys/topology.h"

namespace kt::sys {
namespace {

using std::chrono::nanoseconds;

// Two cache lines, because the adjacent-line prefetcher moves lines in pairs.
constexpr size_t kLine = 128;

// About the cost of a futex sleep and wake-up, so that waiting takes at most twice the optimum.
constexpr nanoseconds kSpin{25'000};
// For barriers, if CPUs are free for other threads. A worker that comes late was interrupted. The
// others must not be late as well because they went to sleep in the meantime.
constexpr nanoseconds kSpinAtBarrier{1'000'000};
// With more threads than CPUs, the awaited thread may need the CPU on which the waiter spins.
constexpr nanoseconds kSpinOversubscribed{1'000};

// A counter that one thread at a time advances and others wait for.
struct alignas(kLine) Gate {
  std::atomic<uint32_t> count{0};
  std::atomic<uint32_t> sleepers{0};

  // seq_cst on both words, here and below: either the opener sees the sleeper and wakes it, or the
  // sleeper sees the new count and does not sleep. The store also releases what the opener wrote
  // before.
  void open() {
    count.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&count);
  }

  // acquire: sees everything that the opener wrote or saw before open(). Sleeps once `spin` is over
  // and go_on(), which is called after every spin, returns false. Returns whether it slept.
  template <class GoOn> bool wait_past(uint32_t old, nanoseconds spin, GoOn go_on) {
    do {
      if (spin_until([&] { return count.load(std::memory_order_acquire) != old; }, spin))
        return false;
    } while (go_on());
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (count.load(std::memory_order_seq_cst) == old) futex_wait(&count, old);
    sleepers.fetch_sub(1, std::memory_order_relaxed);  // only a hint for later wake-ups
    return true;
  }
  void wait_past(uint32_t old, nanoseconds spin) {
    wait_past(old, spin, [] { return false; });
  }
};

struct alignas(kLine) Counter {
  std::atomic<int> arrived{0};

  // True for the last of `expected` threads, which resets the counter to zero for the next round.
  // acq_rel: the last thread has seen everything that the others wrote before arriving, and a
  // thread that it then releases (through a Gate) sees it, too. The reset may be relaxed for the
  // same reason: no thread arrives again before it has passed that Gate.
  bool last_of(int expected) {
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 != expected) return false;
    arrived.store(0, std::memory_order_relaxed);
    return true;
  }
};

// The state that the threads of a pool share. Each pool has its own, so that most of the traffic of
// a team-wide barrier stays inside a NUMA node.
struct Pool {
  Counter in_pool, in_team, finished;
  Gate pool_gate, team_gate;
  std::vector<int> cpus;  // that the threads may use; empty: no restriction
};

// Ignores failure: running on other CPUs is slower, but correct.
void restrict_to(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const int bits = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(bits);
  if (!set) return;
  const size_t bytes = CPU_ALLOC_SIZE(bits);
  CPU_ZERO_S(bytes, set);
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, set);
  pthread_setaffinity_np(pthread_self(), bytes, set);
  CPU_FREE(set);
}

}  // namespace

class Crew {
 public:
  explicit Crew(const std::vector<PoolSpec>& specs);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // In a child, deletes the parent's crew.
  static void leave_behind(Crew* crew);
  void submit(std::shared_ptr<Job> job);
  void expect_until(int64_t time) { expected_until_.store(time, std::memory_order_relaxed); }
  void pool_barrier(const Worker& worker);
  void team_barrier(const Worker& worker);

 private:
  struct Thread {
    Worker full, lean;  // as seen by jobs of each kind; reserves use only `full`
    bool reserve;
    uint32_t seen;  // openings of its gate before it starts
  };

  static void* thread_main(void* thread);
  void start();
  void join();
  void work(Thread& thread);
  void finish(Job* job);
  void publish(Job* job);
  bool expects_work(int64_t& asked);

  const std::vector<PoolSpec> specs_;
  int busy_pools_ = 0;  // pools with at least one thread, and so with one that is not a reserve
  std::unique_ptr<Pool[]> pools_;
  std::vector<Thread> members_;
  bool any_reserve_ = false;

  // Set by start() before the threads that read them exist.
  nanoseconds spin_ = kSpin, barrier_spin_ = kSpin, wait_spin_ = kSpin;
  bool cpus_free_ = false;  // for threads besides the team, while all its threads run

  // In nanoseconds of the steady clock. relaxed everywhere: it only determines how long to spin.
  alignas(kLine) std::atomic<int64_t> expected_until_{0};
  Crowding crowding_;

  // Written under mutex_ while every worker is between two jobs, then released by the gates. A
  // reserve reads it only after its gate has opened; the job that it then finds waits for it.
  Job* current_ = nullptr;         // null: the workers must leave
  std::atomic<bool> lean_{false};  // of current_; relaxed: it only determines how long to spin
  Gate job_gate_;                  // opens once for every value of current_
  Gate reserve_gate_;              // opens once for every value except lean jobs
  Counter pools_in_team_, pools_finished_;

  alignas(kLine) std::mutex mutex_;         // guards the fields below, and start()
  std::deque<std::shared_ptr<Job>> queue_;  // the front is running
  std::vector<pthread_t> threads_;          // empty before start()
  bool stopping_ = false;
};

Crew::Crew(const std::vector<PoolSpec>& specs)
    : specs_(specs), pools_(std::make_unique<Pool[]>(specs.size())) {
  int all_mains = 0;  // threads that are not reserves
  for (size_t p = 0; p < specs_.size(); ++p) {
    const int threads = specs_[p].threads, mains = threads - specs_[p].reserves;
    busy_pools_ += threads > 0;
    any_reserve_ |= mains < threads;
    for (int i = 0; i < threads; ++i) {
      Worker worker;
      worker.pool = static_cast<int>(p);
      worker.thread = worker.rank = static_cast<int>(members_.size());
      worker.index = i;
      worker.pool_threads = threads;
      worker.crew_ = this;
      Worker lean = worker;
      lean.rank = all_mains + i;
      lean.pool_threads = mains;
      members_.push_back({worker, lean, i >= mains, 0});
    }
    all_mains += mains;
  }
  for (Thread& thread : members_) {
    thread.full.team_threads = static_cast<int>(members_.size());
    thread.lean.team_threads = all_mains;
  }
}

Crew::~Crew() {
  {
    std::lock_guard lock(mutex_);
    for (pthread_t thread : threads_) {
      if (pthread_equal(thread, pthread_self())) {
        std::fputs("kt: a thread team was destroyed by one of its own workers\n", stderr);
        std::abort();
      }
    }
    stopping_ = true;  // if a job is queued, the worker that finishes the last one ends the others
    if (!threads_.empty() && queue_.empty()) publish(nullptr);
  }
  join();
}

// Frees the queued jobs, and what they own. If a thread held the mutex at the fork, the queue may
// be in the middle of a change, so nothing is freed.
void Crew::leave_behind(Crew* crew) {
  if (!crew || !crew->mutex_.try_lock()) return;
  crew->mutex_.unlock();
  crew->threads_.clear();  // they do not exist here
  delete crew;
}

void Crew::submit(std::shared_ptr<Job> job) {
  std::lock_guard lock(mutex_);
  if (threads_.empty()) start();
  queue_.push_back(std::move(job));
  Job* const queued = queue_.back().get();
  queued->wait_spin_ns_.store(static_cast<uint32_t>(wait_spin_.count()), std::memory_order_relaxed);
  queued->forks_.store(forks(), std::memory_order_relaxed);
  // A state other than kDone may already have sleepers. relaxed: the workers get the job through
  // job_gate_, and other threads through the handover of the pointer.
  uint32_t done = Job::kDone;
  queued->state_.compare_exchange_strong(done, Job::kPending, std::memory_order_relaxed);
  // Still under the lock: once the job is done, another thread may destroy the team, but only after
  // it gets the lock.
  if (queue_.size() == 1) publish(queued);
}

// Needs mutex_.
void Crew::publish(Job* job) {
  const bool lean = job && job->lean();
  current_ = job;
  lean_.store(lean, std::memory_order_relaxed);
  job_gate_.open();
  if (any_reserve_ && !lean) reserve_gate_.open();
}

// A reserve waits only for full jobs. While these follow each other, it spins as long as the other
// threads do. After the first lean job, it sleeps.
void Crew::work(Thread& thread) {
  Pool& pool = pools_[static_cast<size_t>(thread.full.pool)];
  Gate& gate = thread.reserve ? reserve_gate_ : job_gate_;
  for (uint32_t seen = thread.seen;; ++seen) {
    int64_t asked = 0;
    const bool slept = gate.wait_past(seen, spin_, [&] {
      return !(thread.reserve && lean_.load(std::memory_order_relaxed)) && expects_work(asked);
    });
    if (asked && !slept) expects_work(asked);  // records whether the last spin was interrupted
    Job* const job = current_;
    if (!job) return;
    Worker& worker = job->lean() ? thread.lean : thread.full;
    job->run(worker);
    if (pool.finished.last_of(worker.pool_threads) && pools_finished_.last_of(busy_pools_))
      finish(job);
  }
}

// Called after every spin of a wait, and after a successful one. `asked` is the time of the last
// call, 0 at first. Returns false with too few CPUs, because the thread that will submit the work
// needs them. If the system took the CPU away during a spin, the spinner would also be late for the
// work; the system wakes a sleeper sooner.
bool Crew::expects_work(int64_t& asked) {
  const int64_t until = expected_until_.load(std::memory_order_relaxed);
  if (!until || !cpus_free_) return false;
  const int64_t now = now_ns();
  if (asked) crowding_.spun(asked, now);
  asked = now;
  return now < until && !crowding_.at(now);
}

// Called by the last worker to leave the job. What all workers wrote is visible to finished(), to
// waiters (through state_) and to the next job (through the gates). It is visible to a reserve that
// sat out lean jobs, too, because the thread that opens its gate has seen it.
void Crew::finish(Job* job) {
  job->finished();
  // release: for the waiters.
  const bool sleepers =
      job->state_.exchange(Job::kDone, std::memory_order_release) == Job::kPendingWithSleepers;
  std::shared_ptr<Job> finished;  // keeps the job, so that its destructor runs without the lock
  {
    std::lock_guard lock(mutex_);
    finished = std::move(queue_.front());
    queue_.pop_front();
    if (!queue_.empty()) {
      publish(queue_.front().get());
    } else if (stopping_) {
      publish(nullptr);
    }
  }
  if (sleepers) futex_wake_all(&job->state_);
}

void Crew::pool_barrier(const Worker& worker) {
  Pool& pool = pools_[static_cast<size_t>(worker.pool)];
  // relaxed, and read before arriving: this thread has passed the previous opening, or was in a job
  // before, and the next opening waits for it.
  const uint32_t seen = pool.pool_gate.count.load(std::memory_order_relaxed);
  if (pool.in_pool.last_of(worker.pool_threads)) {
    pool.pool_gate.open();
  } else {
    pool.pool_gate.wait_past(seen, barrier_spin_);
  }
}

void Crew::team_barrier(const Worker& worker) {
  Pool& pool = pools_[static_cast<size_t>(worker.pool)];
  const uint32_t seen = pool.team_gate.count.load(std::memory_order_relaxed);  // as above
  if (pool.in_team.last_of(worker.pool_threads) && pools_in_team_.last_of(busy_pools_)) {
    for (size_t p = 0; p < specs_.size(); ++p) pools_[p].team_gate.open();
  } else {
    pool.team_gate.wait_past(seen, barrier_spin_);
  }
}

void* Crew::thread_main(void* argument) {
  Thread& thread = *static_cast<Thread*>(argument);
  const Worker& worker = thread.full;
  Crew& crew = *worker.crew_;
  std::string name = "kt-" + std::to_string(worker.pool) + "." + std::to_string(worker.index);
  name.resize(std::min<size_t>(name.size(), 15));  // the kernel refuses longer names
  pthread_setname_np(pthread_self(), name.c_str());
  restrict_to(crew.pools_[static_cast<size_t>(worker.pool)].cpus);
  // A thread inherits rounding and denormal modes from its creator; results must not depend on
  // them.
  constexpr unsigned kDefaultFloatMode = 0x1f80;
  _mm_setcsr(kDefaultFloatMode);
  crew.work(thread);
  return nullptr;
}

// Needs mutex_. Throws std::system_error, with no thread left running.
void Crew::start() {
  const std::vector<int> allowed = allowed_cpus();
  const int team = static_cast<int>(members_.size());
  const int cpus = usable_cpus();
  bool oversubscribed = team > cpus;

  const auto on_a_node = [](const PoolSpec& spec) { return spec.node >= 0; };
  const bool any_node = std::any_of(specs_.begin(), specs_.end(), on_a_node);
  const std::vector<Node> nodes = any_node ? topology() : std::vector<Node>();
  for (size_t p = 0; p < specs_.size(); ++p) {
    Pool& pool = pools_[p];
    pool.cpus.clear();
    for (const Node& node : nodes) {
      if (node.id != specs_[p].node) continue;
      for (int cpu : node.cpus) {  // a simulated topology may name CPUs that we may not use
        if (std::binary_search(allowed.begin(), allowed.end(), cpu)) pool.cpus.push_back(cpu);
      }
      const int here = static_cast<int>(pool.cpus.size());
      oversubscribed |= here > 0 && specs_[p].threads > here;
    }
  }
  spin_ = oversubscribed ? kSpinOversubscribed : kSpin;
  wait_spin_ = oversubscribed || team == cpus ? kSpinOversubscribed : kSpin;
  cpus_free_ = !oversubscribed && team + kBesideTeam <= cpus;
  barrier_spin_ = cpus_free_ ? kSpinAtBarrier : spin_;

  // relaxed: only written under mutex_
  for (Thread& member : members_)
    member.seen =
        (member.reserve ? reserve_gate_ : job_gate_).count.load(std::memory_order_relaxed);
  threads_.reserve(members_.size());
  const SignalsBlocked blocked;
  for (Thread& member : members_) {
    pthread_t thread;
    const int error = pthread_create(&thread, nullptr, thread_main, &member);
    if (error) {
      publish(nullptr);
      join();
      throw std::system_error(error, std::generic_category(),
                              "cannot start a team of " + std::to_string(team) +
                                  " threads (number " + std::to_string(member.full.rank + 1) + ")");
    }
    threads_.push_back(thread);
  }
}

void Crew::join() {
  for (pthread_t thread : threads_) pthread_join(thread, nullptr);
  threads_.clear();
}

void Worker::pool_barrier() { crew_->pool_barrier(*this); }
void Worker::team_barrier() { crew_->team_barrier(*this); }

void Job::wait() {
  // relaxed: the caller has the job from a thread of this process, or from before the fork.
  if (!done() && forks_.load(std::memory_order_relaxed) != forks())
    throw std::runtime_error("this job was submitted before the process forked and is lost");
  const nanoseconds spin{wait_spin_ns_.load(std::memory_order_relaxed)};  // a hint
  if (spin_until([this] { return done(); }, spin)) return;
  // acquire wherever kDone may be read; see Crew::finish.
  uint32_t state = state_.load(std::memory_order_acquire);
  while (state != kDone) {
    if (state == kPending &&
        !state_.compare_exchange_strong(state, kPendingWithSleepers, std::memory_order_acquire)) {
      continue;  // it has changed, and `state` is the new value
    }
    futex_wait(&state_, kPendingWithSleepers);
    state = state_.load(std::memory_order_acquire);
  }
}

Team::Team(std::vector<PoolSpec> pools) : pools_(std::move(pools)) {
  int64_t all = 0;
  for (const PoolSpec& pool : pools_) {
    need(pool.threads >= 0 && pool.threads <= kMaxThreads,
         "a pool of " + std::to_string(pool.threads) + " threads; accepted: 0 to " +
             std::to_string(kMaxThreads));
    need(pool.node >= -1 && pool.node <= kMaxNode, "a pool on node " + std::to_string(pool.node) +
                                                       "; accepted: -1 (any) to " +
                                                       std::to_string(kMaxNode));
    need(pool.reserves >= 0 && pool.reserves <= std::max(pool.threads - 1, 0),
         std::to_string(pool.reserves) + " reserves in a pool of " + std::to_string(pool.threads) +
             " threads; accepted: 0 to " + std::to_string(std::max(pool.threads - 1, 0)));
    all += pool.threads;
  }
  need(all >= 1 && all <= kMaxThreads, "a team of " + std::to_string(all) +
                                           " threads; accepted: 1 to " +
                                           std::to_string(kMaxThreads));
}

Team::~Team() {
  if (process_.ready())
    delete crew_;
  else
    Crew::leave_behind(crew_);
}

int Team::threads() const {
  int sum = 0;
  for (const PoolSpec& pool : pools_) sum += pool.threads;
  return sum;
}

Crew& Team::crew() {
  process_.ensure([this] {
    auto fresh = std::make_unique<Crew>(pools_);
    Crew::leave_behind(std::exchange(crew_, fresh.release()));
  });
  return *crew_;
}

void Team::submit(std::shared_ptr<Job> job) {
  if (!job) throw std::invalid_argument("a null job");
  crew().submit(std::move(job));
}

void Team::expect_until(int64_t time) noexcept {
  if (process_.ready()) crew_->expect_until(time);
}

}  // namespace kt::sys
