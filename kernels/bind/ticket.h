// A job in progress, as Python holds it.
#pragma once
#include <exception>
#include <memory>
#include <vector>

#include "../sys/team.h"
#include "bind.h"

// Keeps the arrays that the job works on until it is done.
struct Ticket {
  std::shared_ptr<kt::sys::Job> job;
  std::vector<nb::object> arrays{};

  Ticket(std::shared_ptr<kt::sys::Job> of, std::vector<nb::object> uses = {})
      : job(std::move(of)), arrays(std::move(uses)) {}
  Ticket(Ticket&&) = default;
  ~Ticket() {
    if (!job || arrays.empty() || job->done()) return;
    const nb::gil_scoped_release unlocked;
    try {
      job->wait();
    } catch (const std::exception&) {  // in a child of the process that queued it: never done
    }
  }
};
