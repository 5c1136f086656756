// Host memory that a GPU can access.
#pragma once
#include <cstdint>
#include <memory>

#include "../sys/numa_memory.h"

namespace kt {

// Bytes. A word that the GPU or the CPU writes and the other one polls has a pair of cache lines
// (which are prefetched together) of its own.
constexpr int64_t kApart = 128;

// Zeroed, page-aligned memory. A caller that registers its address with CUDA must keep the buffer
// until it is unregistered.
//
// A forked child does not inherit the memory: with copy-on-write, the parent's next write could
// move a page that the GPU accesses by its physical address. The object exists in the child, but
// its memory does not: see here().
//
// enable_shared_from_this, here and in StreamSide: Python's references and those of jobs then share
// one count, so jobs never need the GIL to drop one.
class HostBuffer : public std::enable_shared_from_this<HostBuffer> {
 public:
  explicit HostBuffer(int64_t bytes);  // throws std::invalid_argument, std::bad_alloc
  ~HostBuffer();
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  uint8_t* data() const { return memory_.data(); }
  bool here() const;  // false in a child of the process that created it
  int64_t bytes() const { return int64_t(memory_.size()); }

 private:
  sys::Mapping memory_;
  const uint32_t forks_;
};

}  // namespace kt
