#include "host_buffer.h"

#include <sys/mman.h>

#include <string>
#include <utility>

#include "../sys/fork.h"
#include "../sys/need.h"

namespace kt {
namespace {

sys::Mapping map(int64_t bytes) {
  need(bytes >= 1, "a buffer of " + std::to_string(bytes) + " bytes; 1 or more");
  return sys::Mapping(size_t(bytes));
}

}  // namespace

HostBuffer::HostBuffer(int64_t bytes) : memory_(map(bytes)), forks_(sys::forks()) {
  madvise(memory_.data(), memory_.size(), MADV_DONTFORK);
}

HostBuffer::~HostBuffer() {
  // In a child something else may be mapped there by now.
  if (sys::forks() != forks_) new sys::Mapping(std::move(memory_));  // left behind
}

}  // namespace kt
