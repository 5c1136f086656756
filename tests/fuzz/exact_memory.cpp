// Replaces kernels/sys/numa_memory.cpp: mappings whose exact end, to the byte, the sanitizer
// checks.
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <new>
#include <utility>

#include "kt/format.h"
#include "sys/numa_memory.h"

namespace kt::sys {
namespace {

constexpr size_t kMost = size_t{4} << 30;
constexpr size_t kPage = 4096, kAlignment = 64;

size_t mapped_bytes(size_t bytes) { return size_t(round_up(int64_t(bytes), kPage)) + kPage; }

// The bytes before the data. The data ends where the last page, which is poisoned, begins.
size_t bytes_before(size_t bytes) {
  return mapped_bytes(bytes) - kPage - size_t(round_up(int64_t(bytes), kAlignment));
}

}  // namespace

Mapping::Mapping(size_t bytes, int) {
  if (bytes == 0) return;
  if (bytes > kMost) throw std::bad_alloc();
  const size_t mapped = mapped_bytes(bytes);
  void* all = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(all) + bytes_before(bytes);
  size_ = bytes;
  __asan_poison_memory_region(all, bytes_before(bytes));
  __asan_poison_memory_region(data_ + bytes, mapped - bytes_before(bytes) - bytes);
}

Mapping::~Mapping() {
  if (!data_) return;
  uint8_t* const all = data_ - bytes_before(size_);
  __asan_unpoison_memory_region(all, mapped_bytes(size_));
  munmap(all, mapped_bytes(size_));
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  Mapping taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  return *this;
}

}  // namespace kt::sys
