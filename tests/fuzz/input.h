// The meaning of a fuzzer's bytes: choices, random numbers seeded by them, and memory whose exact
// end the sanitizer checks.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define REQUIRE(condition)                                                          \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                 \
    }                                                                               \
  } while (0)

namespace fuzz {

// Choices are read from the front. Past the end, they are zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
  uint64_t word() {
    uint64_t x = 0;
    for (int i = 0; i < 8; ++i) x |= uint64_t(byte()) << 8 * i;
    return x;
  }
  // From 0 to n - 1; n up to 65536.
  int64_t below(int64_t n) {
    const int64_t low = byte();
    return (n > 256 ? low | byte() << 8 : low) % n;
  }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool flag() { return byte() & 1; }

 private:
  const uint8_t *at_, *end_;
};

// Random numbers from a seed (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  uint64_t below(uint64_t n) { return next() % n; }
  void fill(uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 8) {
      const uint64_t x = next();
      std::memcpy(p + i, &x, size_t(bytes - i < 8 ? bytes - i : 8));
    }
  }

 private:
  uint64_t state_;
};

// Exactly this many bytes, from an odd address if `shift` is 1, otherwise aligned to 64.
class Bytes {
 public:
  explicit Bytes(int64_t size, int shift = 0, int fill = 0xa5) : size_(size), shift_(shift) {
    if (posix_memalign(&room_, 64, size_t(size + shift))) std::abort();
    std::memset(data(), fill, size_t(size));
  }
  ~Bytes() { std::free(room_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(room_) + shift_; }
  template <class T> T* as() const { return reinterpret_cast<T*>(data()); }
  int64_t size() const { return size_; }
  void copy(const Bytes& other) { std::memcpy(data(), other.data(), size_t(size_)); }
  bool operator==(const Bytes& other) const {
    return size_ == other.size_ && !std::memcmp(data(), other.data(), size_t(size_));
  }
  // Changes a few bytes as the input says: often those of scales, and those at the end of a range.
  void patch(Input& in, int count) {
    constexpr uint8_t kEnds[] = {0x00, 0x01, 0x10, 0x11, 0x1f, 0x20, 0x3f, 0x40,
                                 0x7c, 0x7e, 0x7f, 0x80, 0xdf, 0xe0, 0xfe, 0xff};
    for (; count > 0 && size_ > 0; --count) {
      const int64_t low = in.byte(), far = in.flag() ? in.below(65536) << 8 : 0;
      const uint8_t value = in.byte();
      data()[(low | far) % size_] = in.flag() ? kEnds[value % 16] : value;
    }
  }

 private:
  int64_t size_;
  int shift_;
  void* room_ = nullptr;
};

}  // namespace fuzz
