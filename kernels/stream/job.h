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

// The progress of one engine, which its jobs may outlive.
struct StreamProgress {
  std::atomic<int64_t> pending{0};  // entries taken whose done word was not yet written
  std::atomic<int64_t> running{0};  // jobs that are not done, and entries being handled
};

// How soon after an entry or a job the next one is likely. The team's workers do not sleep during
// this time.
constexpr int64_t kExpectNs = 5'000'000;

class StreamJob final : public ForwardJob {
 public:
  // The objects that a job reads and writes, which it owns.
  struct Uses {
    std::shared_ptr<StreamSide> side, added;  // `added`: the side whose partial it adds, or null
    std::shared_ptr<StreamProgress> progress;
    std::shared_ptr<TraceRecord> record;  // where its times go, or null
  };
  // With a number, the job writes the done word of its side when it is done. `team` is the team
  // that it is submitted to.
  StreamJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args, Uses uses, sys::Team& team,
            std::optional<uint32_t> number);

  // Writes the done word, unless it was written before. From any thread.
  void ring() noexcept;
  void run(sys::Worker& worker) noexcept override;
  bool rung() const noexcept { return !rings_.load(std::memory_order_relaxed); }
  void finished() noexcept override;
  StreamSide& side() const { return *uses_.side; }

 private:
  const Uses uses_;
  sys::Team& team_;  // alive while one of its workers is in finished()
  const uint32_t number_;
  const bool late_;  // nobody waits for it
  std::atomic<bool> rings_;
};

// Writes the done word of an entry, which is then no longer pending. record: null where nothing is
// traced.
inline void ring(const StreamSide& side, uint32_t number, StreamProgress& progress,
                 TraceRecord* record) noexcept {
  if (record) record->rung = sys::now_ns();  // before: the GPU cannot have seen it earlier
  side.ring(number);
  // release: a thread that sees that nothing is pending also sees the results.
  progress.pending.fetch_sub(1, std::memory_order_release);
}

}  // namespace kt
