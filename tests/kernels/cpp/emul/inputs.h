// Random and extreme inputs for the cases.
#pragma once
#include <initializer_list>
#include <random>

#include "cases.h"

static std::mt19937_64 rng(20240607);

static float normal() {
  static std::normal_distribution<float> d;
  return d(rng);
}
static uint32_t pick(std::initializer_list<uint32_t> from) {
  return from.begin()[rng() % from.size()];
}

constexpr int kPatterns = 8;
static uint32_t dword(int pattern) {
  const auto r = static_cast<uint32_t>(rng());
  switch (pattern) {
    case 0: return r;
    case 1: {  // extreme bytes
      uint32_t u = 0;
      for (int i = 0; i < 4; ++i) u = u << 8 | pick({0x80, 0x7f, 0xff, 0x00, 0x01, 0x81});
      return u;
    }
    case 2: return bits_of(ldexpf(normal(), static_cast<int>(r % 17) - 8));
    case 3:  // special floats
      return pick({0, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00001, 0xff812345, 0x00000001,
                   0x807fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x3f800000, bits_of(normal()),
                   0x4f000000, 0xcf000000, 0x477fe000, 0x477ff000, 0x33000000, 0x38800000});
    case 4:  // pairs of bf16
      return (bits_of(normal()) & 0xffff0000) | bits_of(normal()) >> 16;
    case 5: {  // pairs of bf16 whose products are near the smallest normal float
      const float f = ldexpf(normal(), -63), g = ldexpf(normal(), -63 - static_cast<int>(r % 3));
      return (bits_of(f) & 0xffff0000) | bits_of(g) >> 16;
    }
    case 6:  // ties of round-to-integer, and values beyond the integer range
      return bits_of(static_cast<float>(static_cast<int>(r % 2001) - 1000) *
                     (r & 1 << 20 ? 0.5f : 3e6f));
    default:  // ties of float32 to bf16 and to fp16
      return (r & 0xbfff0000) | pick({0x7fff, 0x8000, 0x8001, 0, 0x1000, 0x3000});
  }
}
static void fill(uint8_t* p, int pattern) {
  for (int i = 0; i < 256; ++i) {
    uint32_t v = dword(pattern);
    memcpy(p + 4 * i, &v, 4);
  }
}
static void make_input(Input& in, int pattern) {
  fill(in.a, pattern);
  fill(in.b, pattern);
  fill(in.c, pattern);
  if (pattern == 4 || pattern == 5)  // accumulators of the products' magnitude
    for (int i = 0; i < 256; ++i) {
      const float f = ldexpf(normal(), pattern == 4 ? 0 : -126);
      memcpy(in.c + 4 * i, &f, 4);
    }
  in.k = rng() % 8 == 0 ? 0 : rng() % 8 == 0 ? ~0ull : rng();
}
