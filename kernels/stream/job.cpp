#include "job.h"

#include <utility>

#include "../sys/futex.h"

namespace kt {

StreamJob::StreamJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args, Uses uses,
                     sys::Team& team, std::optional<uint32_t> number)
    : ForwardJob(std::move(layer), args),
      uses_(std::move(uses)),
      team_(team),
      number_(number.value_or(0)),
      rings_(number.has_value()) {}

void StreamJob::ring() noexcept {
  if (rings_.exchange(false, std::memory_order_relaxed))
    kt::ring(*uses_.side, number_, *uses_.progress);
}

void StreamJob::finished() noexcept {
  ring();
  uses_.progress->running.fetch_sub(1, std::memory_order_release);
  team_.expect_until(sys::now_ns() + kExpectNs);
}

}  // namespace kt
