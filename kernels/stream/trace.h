// The times of a stream engine's entries, for traces.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "side.h"

namespace kt {

// Times in nanoseconds, 0 if something did not happen. hand_* and back_* are of the GPU's clock,
// the others of the steady clock.
struct TraceRecord {
  int64_t slot, number, position, chain, tokens;
  int64_t hand_start, hand_end, seen;
  std::atomic<int64_t> rung{0}, begun{0}, ended{0}, late_begun{0}, late_ended{0};
  int64_t back_start = 0, back_ready = 0, back_end = 0;
};

class StreamTrace {
 public:
  // slot, number, position, chain, tokens, hand_start, hand_end, seen, rung, begun, ended,
  // late_begun, late_ended, back_start, back_ready, back_end
  using Row = std::array<int64_t, 16>;

  // Called by the poller when it has taken an entry of this side. Stores its record in the side and
  // returns the previous record with the times of its result, which exist by now. The deferred job
  // of that entry may still run.
  std::shared_ptr<TraceRecord> next(StreamSide& side, std::shared_ptr<TraceRecord> record);
  // Adds the record of an entry whose jobs are done. Does nothing for null.
  void add(const std::shared_ptr<TraceRecord>& record) noexcept;
  // Returns rows added since the last call. Rows beyond kMost, or without memory for them, are
  // lost.
  std::vector<Row> take();
  int64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kMost = 1 << 18;  // 32 MB
  std::mutex mutex_;
  std::vector<Row> rows_;
  std::atomic<int64_t> dropped_{0};
};

}  // namespace kt
