// A forward pass that a GPU waits for.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "../moe/forward.h"
#include "../sys/futex.h"
#include "side.h"
#include "trace.h"

namespace kt {

// The progress of one engine. Its jobs may outlive the engine.
struct StreamProgress {
  std::atomic<int64_t> pending{0};  // entries taken whose done word has not been written yet
  std::atomic<int64_t> running{0};  // jobs that are not done, and entries being handled
};

// The time within which the next entry is likely after an entry or a job. The team's workers do not
// sleep during this time.
constexpr int64_t kExpectNs = 5'000'000;

class StreamJob final : public ForwardJob {
 public:
  // The objects that a job reads and writes, and co-owns.
  struct Uses {
    std::shared_ptr<StreamSide> side, added;  // `added`: the side whose partial it adds, or null
    std::shared_ptr<StreamProgress> progress;
    std::shared_ptr<TraceRecord> record;  // receives its times, or null
  };
  // With a number, the job writes the done word of its side when it is done. `team` is the team to
  // which it is submitted.
  StreamJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args, Uses uses, sys::Team& team,
            std::optional<uint32_t> number);

  // Writes the done word unless it has been written. Thread-safe.
  void ring() noexcept;
  void run(sys::Worker& worker) noexcept override;
  bool rung() const noexcept { return !rings_.load(std::memory_order_relaxed); }
  void finished() noexcept override;
  StreamSide& side() const { return *uses_.side; }

 private:
  const Uses uses_;
  sys::Team& team_;  // alive while one of its workers is in finished()
  const uint32_t number_;
  const bool late_;  // no one waits for it
  std::atomic<bool> rings_;
};

// Writes the done word of an entry, which is then no longer pending. record: null if nothing is
// traced.
inline void ring(const StreamSide& side, uint32_t number, StreamProgress& progress,
                 TraceRecord* record) noexcept {
  if (record) record->rung = sys::now_ns();  // before the write, so the GPU cannot have seen it yet
  side.ring(number);
  // release: a thread that sees that nothing is pending also sees the results.
  progress.pending.fetch_sub(1, std::memory_order_release);
}

}  // namespace kt
