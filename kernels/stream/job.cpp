#include "job.h"

#include <utility>

namespace kt {

StreamJob::StreamJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args, Uses uses,
                     sys::Team& team, std::optional<uint32_t> number)
    : ForwardJob(std::move(layer), args),
      uses_(std::move(uses)),
      team_(team),
      number_(number.value_or(0)),
      late_(!number.has_value()),
      rings_(number.has_value()) {}

void StreamJob::ring() noexcept {
  if (rings_.exchange(false, std::memory_order_relaxed))
    kt::ring(*uses_.side, number_, *uses_.progress, uses_.record.get());
}

void StreamJob::run(sys::Worker& worker) noexcept {
  if (TraceRecord* record = uses_.record.get(); record && worker.rank == 0)
    (late_ ? record->late_begun : record->begun) = sys::now_ns();
  ForwardJob::run(worker);
}

void StreamJob::finished() noexcept {
  if (TraceRecord* record = uses_.record.get())
    (late_ ? record->late_ended : record->ended) = sys::now_ns();
  ring();
  uses_.progress->running.fetch_sub(1, std::memory_order_release);
  team_.expect_until(sys::now_ns() + kExpectNs);
}

}  // namespace kt
