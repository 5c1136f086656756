#include "trace.h"

#include <new>
#include <utility>

namespace kt {

std::shared_ptr<TraceRecord> StreamTrace::next(StreamSide& side,
                                               std::shared_ptr<TraceRecord> record) {
  std::shared_ptr<TraceRecord> before = std::exchange(side.priv.record, std::move(record));
  const StreamTimes& times = *side.times();
  if (before && times.back_number == before->number) {
    before->back_start = times.back_start;
    before->back_ready = times.back_ready;
    before->back_end = times.back_end;
  }
  return before;
}

void StreamTrace::add(const std::shared_ptr<TraceRecord>& record) noexcept {
  if (!record) return;
  const TraceRecord& r = *record;
  std::lock_guard lock(mutex_);
  try {
    if (rows_.size() < kMost) {
      rows_.push_back({r.slot, r.number, r.position, r.chain, r.tokens, r.hand_start, r.hand_end,
                       r.seen, r.rung, r.begun, r.ended, r.late_begun, r.late_ended, r.back_start,
                       r.back_ready, r.back_end});
      return;
    }
  } catch (const std::bad_alloc&) {  // drop the record: the GPU's results matter more
  }
  dropped_.fetch_add(1, std::memory_order_relaxed);
}

std::vector<StreamTrace::Row> StreamTrace::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(rows_, {});
}

}  // namespace kt
