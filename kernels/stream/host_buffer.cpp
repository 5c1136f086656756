#include "host_buffer.h"

#include <sys/mman.h>

#include <string>

#include "../sys/fork.h"
#include "../sys/need.h"

namespace kt {
namespace {

sys::Mapping map(int64_t bytes) {
  need(bytes >= 1, "a buffer of " + std::to_string(bytes) + " bytes; accepted: 1 or more");
  return sys::Mapping(size_t(bytes));
}

}  // namespace

HostBuffer::HostBuffer(int64_t bytes) : memory_(map(bytes)), forks_(sys::forks()) {
  madvise(memory_.data(), memory_.size(), MADV_DONTFORK);
}

HostBuffer::~HostBuffer() {
  // In a child, something else may be mapped there by now.
  if (!here()) memory_.leave_behind();
}

bool HostBuffer::here() const { return sys::forks() == forks_; }

}  // namespace kt
