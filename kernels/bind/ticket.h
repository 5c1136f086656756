// A job in progress, as Python holds it.
#pragma once
#include <exception>
#include <memory>
#include <vector>

#include "../sys/team.h"
#include "bind.h"

// Keeps the owners of the memory that the job works on until it is done. The destructor waits, also
// without owners: Python drops a ticket before its caller has it if a signal's handler raises as
// soon as the call that made it returns, and the caller then lets go of the memory.
struct Ticket {
  using Owners = std::vector<std::shared_ptr<const void>>;
  std::shared_ptr<kt::sys::Job> job;
  Owners owners{};

  Ticket(std::shared_ptr<kt::sys::Job> of, Owners of_memory = {})
      : job(std::move(of)), owners(std::move(of_memory)) {}
  Ticket(Ticket&&) = default;
  ~Ticket() {
    if (!job || job->done()) return;
    const nb::gil_scoped_release unlocked;
    try {
      job->wait();
    } catch (const std::exception&) {  // in a child of the process that queued it: never done
    }
  }
};
