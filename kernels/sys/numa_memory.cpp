#include "sys/numa_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "sys/sysfs.h"

namespace kt::sys {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallPage = 4096;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Not a local static: a fork during its initialisation would leave it locked in the child.
std::atomic<int> g_several_nodes{-1};  // -1: not known yet

bool has_several_nodes() {
  int several = g_several_nodes.load(std::memory_order_relaxed);
  if (several < 0) {
    const auto text = read_text("/sys/devices/system/node/online");
    const auto nodes = text ? parse_list(*text) : std::nullopt;
    several = nodes && nodes->size() > 1;
    g_several_nodes.store(several, std::memory_order_relaxed);
  }
  return several != 0;
}

// Uses the system call directly, which avoids libnuma. Ignores failure: the policy is only a
// preference, many containers refuse it (seccomp), and first touch places the pages correctly
// anyway.
void prefer_node(void* data, size_t bytes, int node) {
  constexpr unsigned kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<unsigned>(node) / kBits + 1);
  mask.back() = 1ul << (static_cast<unsigned>(node) % kBits);
  const unsigned long max_node = mask.size() * kBits + 1;  // the kernel reads one bit less
  syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, mask.data(), max_node, 0);
}

// Maps `bytes` that start on a huge page: maps one huge page more, and unmaps the ends.
void* map_on_huge_pages(size_t bytes) {
  const size_t mapped = bytes + kHugePage - kSmallPage;
  void* raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  uint8_t* const begin = static_cast<uint8_t*>(raw);
  const size_t head =
      round_up(reinterpret_cast<uintptr_t>(raw), kHugePage) - reinterpret_cast<uintptr_t>(raw);
  const size_t tail = mapped - head - bytes;
  if (head) munmap(begin, head);
  if (tail) munmap(begin + head + bytes, tail);
  // Ignored if the kernel has no transparent huge pages, which is slower but correct.
  madvise(begin + head, bytes, MADV_HUGEPAGE);
  return begin + head;
}

}  // namespace

Mapping::Mapping(size_t bytes, int node) {
  if (bytes == 0) return;
  if (bytes > std::numeric_limits<size_t>::max() - 2 * kHugePage) throw std::bad_alloc();
  const size_t mapped = round_up(bytes, kSmallPage);
  void* data;
  if (bytes >= kHugePage) {
    data = map_on_huge_pages(mapped);
  } else {
    data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
  }
  data_ = static_cast<uint8_t*>(data);
  size_ = bytes;
  if (node >= 0 && has_several_nodes()) prefer_node(data, mapped, node);
}

Mapping::~Mapping() {
  if (data_) munmap(data_, round_up(size_, kSmallPage));
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  Mapping taken(std::move(other));  // takes the old mapping in the swap, and frees it
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  return *this;
}

}  // namespace kt::sys
