// Tests for how long sleeps replace interrupted spins.
#include "sys/crowding.h"

#include <cstdint>
#include <cstdio>

namespace {

constexpr int64_t kMs = 1'000'000;
int failed = 0;

void expect(bool right, const char* what) {
  if (!right) {
    std::printf("wrong: %s\n", what);
    ++failed;
  }
}

// How long after `now` it stays crowded, to the next millisecond.
int64_t length(const kt::sys::Crowding& crowding, int64_t now) {
  int64_t end = now;
  while (crowding.at(end)) end += kMs;
  return end - now;
}

}  // namespace

int main() {
  kt::sys::Crowding crowding;
  int64_t now = 1'000 * kMs;
  expect(!crowding.at(now), "nothing happened");
  crowding.spun(now - 200'000, now);
  expect(!crowding.at(now), "0.2 ms between two looks is no interruption");
  crowding.spun(now - 200'001, now);
  expect(length(crowding, now) == kMs, "1 ms after one interruption");
  crowding.spun(now - kMs, now + 1);
  expect(length(crowding, now) == kMs, "no longer for another one meanwhile");

  int64_t expected = kMs;
  for (int i = 0; i < 8; ++i) {  // each 2 ms after the end of the last one
    now += expected + 2 * kMs;
    expect(!crowding.at(now), "over");
    crowding.spun(now - kMs, now);
    expected = expected * 2 > 50 * kMs ? 50 * kMs : expected * 2;
    expect(length(crowding, now) == expected, "twice as long, up to 50 ms");
  }
  now += expected + 8 * expected;
  crowding.spun(now - kMs, now);
  expect(length(crowding, now) == kMs, "1 ms again after a quiet time");
  if (!failed) std::puts("ok");
  return failed != 0;
}
