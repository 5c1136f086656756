// The forward pass of a layer as a job of its team.
#pragma once
#include <memory>

#include "state.h"

namespace kt {

// Each worker runs the driver that fits each chunk of the tokens (drivers.h). The job is lean if it
// is one chunk of few pairs: memory bandwidth then limits it, and the team's last threads add none.
// Reads the ids on construction.
class ForwardJob : public sys::Job {
 public:
  ForwardJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args);
  void run(sys::Worker& worker) noexcept override;

 private:
  const std::shared_ptr<LayerState> layer_;
  const ForwardArgs args_;
};

}  // namespace kt
