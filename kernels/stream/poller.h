// The thread that takes entries from the ring and starts their passes.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../moe/layer.h"
#include "../sys/crowding.h"
#include "errors.h"
#include "job.h"
#include "side.h"
#include "split.h"
#include "trace.h"

namespace kt {

// What the previous layer of a chain has left to be added.
struct Carry {
  int position = 0;
  int64_t tokens = 0;
  std::shared_ptr<StreamSide> side;  // whose partial it is; null if nothing was left
  const sys::Team* team = nullptr;   // that computes it
};

struct StreamSlot {
  std::string where;
  std::shared_ptr<StreamSide> side;
  int chain, position;
  int64_t protected_k;
  Carry* carry;           // of its chain
  const sys::Team* team;  // only for comparisons
  DeferredSplit split;
  // Null once dropped. Python may own it, so only Python's threads drop it, never the poller.
  std::shared_ptr<MoeLayer> layer;
  // Guarded by the poller's mutex, as are layer, and side once it is forgotten.
  bool busy = false;       // one of its entries is being handled
  bool forgotten = false;  // nothing rings it any more, so its side may be released
  int64_t entries = 0;     // handled so far
};

struct StreamStats {
  std::atomic<int64_t> entries{0}, immediate_jobs{0}, deferred_jobs{0}, carried{0};
  std::atomic<int64_t> empty{0};     // entries without a route to the CPU, answered without a job
  std::atomic<int64_t> watchdog{0};  // done words written because a job took too long
  std::atomic<int64_t> sleeps{0};    // of the poller
};

class StreamPoller {
 public:
  // first: the number before the first entry.
  StreamPoller(std::shared_ptr<HostBuffer> buffer, uint64_t* ring, uint32_t* head, uint32_t entries,
               std::chrono::nanoseconds watchdog, uint32_t first, bool traces);
  ~StreamPoller();  // stops
  StreamPoller(const StreamPoller&) = delete;
  StreamPoller& operator=(const StreamPoller&) = delete;

  // These implement StreamEngine's functions of the same names.
  int64_t add_slot(std::shared_ptr<MoeLayer> layer, std::string where,
                   std::shared_ptr<StreamSide> side, int chain, int position, int64_t protected_k);
  void drop_slot(int64_t slot, bool forget);
  int64_t entries_of(int64_t slot);
  bool drain(std::chrono::nanoseconds timeout);
  void stop();
  void wake();
  // The only call for a parent's poller in a child: releases layers and sides. The rest is never
  // freed, because the thread may have stopped in the middle of a change.
  void leave_behind();
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
  Errors& errors() { return errors_; }
  const StreamProgress& progress() const { return *progress_; }
  const StreamStats& stats() const { return stats_; }
  StreamTrace* trace() const { return trace_.get(); }  // null without traces

 private:
  struct Entry {
    StreamSlot& slot;
    uint32_t number;
    int64_t since, tokens;
  };
  struct Running {
    std::shared_ptr<StreamJob> job;
    const StreamSlot* slot;
    int64_t since;
    bool watched;  // a GPU waits for it
  };
  enum class Out { kLeave, kZero };

  void start_thread();  // unless it runs
  void run() noexcept;
  bool rung() const;  // whether the next entry has arrived
  void take() noexcept;
  void handle(uint32_t slot, uint32_t number) noexcept;
  void start(const Entry& entry);
  void submit(const Entry& entry, MoeLayer& layer, const Carry& carry);
  void defer(const Entry& entry, MoeLayer& layer, ForwardArgs args) noexcept;
  void queue(const std::shared_ptr<StreamJob>& job, const Entry& entry, sys::Team& team,
             bool watched);
  void fail(const Entry& entry, Out out, std::initializer_list<std::string_view> why) noexcept;
  bool wait_for(StreamSide& side, const Entry& entry) noexcept;
  void retire() noexcept;
  void watch(int64_t now) noexcept;
  void idle() noexcept;
  bool crowded(int64_t now) noexcept;
  void sleep(std::chrono::nanoseconds time) noexcept;
  std::shared_ptr<TraceRecord> record_of(uint32_t slot, const Entry& entry) noexcept;
  StreamSlot& at(int64_t slot);  // needs mutex_
  StreamSlot* claim(uint32_t slot);
  void release(StreamSlot& slot);

  const std::shared_ptr<HostBuffer> buffer_;
  uint64_t* const ring_;
  uint32_t* const head_;
  const uint32_t mask_;
  const int64_t watchdog_ns_;
  const std::unique_ptr<StreamTrace> trace_;

  // Used by the poller's thread only.
  uint32_t next_;
  int64_t spun_ = 0;    // when it last looked at the clock in the present spin, or 0
  int64_t last_ = 0;    // when something last arrived
  uint32_t woken_ = 0;  // the value of wake_ that it has seen
  sys::Crowding crowding_;
  std::vector<Running> running_;

  std::atomic<uint32_t> wake_{0};
  std::atomic<bool> asleep_{false}, stopping_{false};
  std::atomic<bool> crowded_{false};  // a team leaves no CPU free
  const std::shared_ptr<StreamProgress> progress_ = std::make_shared<StreamProgress>();
  StreamStats stats_;
  Errors errors_;

  std::mutex mutex_;              // guards the next two, and StreamSlot::layer
  std::deque<StreamSlot> slots_;  // a deque, because addresses must not change
  std::map<int, Carry> chains_;   // the values are used by the poller only

  std::mutex thread_mutex_;          // guards thread_, and changes of stopping_
  std::thread thread_;               // not joinable before the first slot and after its end
  std::atomic<bool> ending_{false};  // a call of stop() is joining the thread; others wait for it
};

}  // namespace kt
