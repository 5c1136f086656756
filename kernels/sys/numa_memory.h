// Large zero-filled memory for packed weights and buffers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kt::sys {

// An anonymous mapping, on transparent huge pages if the system allows it. It is untouched: pages
// are placed on the node of the thread that first writes them. `node` >= 0 sets a preference.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(size_t bytes, int node = -1);  // throws std::bad_alloc; 0 bytes: no mapping
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  uint8_t* data() const { return data_; }
  void leave_behind() { data_ = nullptr; }  // keeps the memory mapped
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kt::sys
