// Memory that a GPU may be given access to.
#pragma once
#include <cstdint>
#include <memory>

#include "../sys/numa_memory.h"

namespace kt {

// Bytes: what one of GPU and CPU writes and the other polls has a prefetched pair of cache lines
// for itself.
constexpr int64_t kApart = 128;

// Zeroed, page-aligned memory of its own. Whoever registers it with CUDA does so by its address,
// and keeps the buffer until it is no longer registered.
//
// A forked child does not inherit it: with copy-on-write, the parent's next write could move a page
// that the GPU knows by its place. The object exists there, its memory does not: see here().
//
// enable_shared_from_this here and in StreamSide: Python's references then count in the same place
// as those of jobs, which so never need the GIL to drop one.
class HostBuffer : public std::enable_shared_from_this<HostBuffer> {
 public:
  explicit HostBuffer(int64_t bytes);  // throws std::invalid_argument, std::bad_alloc
  ~HostBuffer();
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  uint8_t* data() const { return memory_.data(); }
  bool here() const;  // false in a child of the process that made it
  int64_t bytes() const { return int64_t(memory_.size()); }

 private:
  sys::Mapping memory_;
  const uint32_t forks_;
};

}  // namespace kt
