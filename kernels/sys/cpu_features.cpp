#include "sys/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace kt::sys {
namespace {

struct Regs {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Returns zeros, meaning "no feature", for a leaf that this CPU does not have.
Regs cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Regs r;
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
  return r;
}

constexpr bool bit(uint32_t word, int index) { return (word >> index) & 1u; }

// The register states that the operating system saves. Inline assembly, because _xgetbv needs
// -mxsave and this file is compiled for the x86-64 baseline. Only valid with OSXSAVE.
uint64_t xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux grants tile data (8 KB per thread) only on request, once for the whole process.
bool request_tile_permission() {
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtileData) == 0;
}

uint32_t detect() {
  const Regs basic = cpuid(1);
  constexpr int kFma = 12, kOsxsave = 27, kAvx = 28, kF16c = 29;  // leaf 1 ecx
  if (!bit(basic.ecx, kOsxsave)) return 0;

  constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe6, kTileState = 0x60000;
  const uint64_t saved = xcr0();
  const auto saves = [saved](uint64_t state) { return (saved & state) == state; };

  const Regs ext = cpuid(7, 0);
  const Regs ext1 = ext.eax >= 1 ? cpuid(7, 1) : Regs{};  // leaf 7.0 eax: the highest subleaf

  const bool floor = saves(kYmmState) && bit(basic.ecx, kAvx) && bit(basic.ecx, kFma) &&
                     bit(basic.ecx, kF16c) && bit(ext.ebx, 5) /*AVX2*/ && bit(ext.ebx, 8) /*BMI2*/;
  if (!floor) return 0;
  uint32_t features = kAvx2;
  if (bit(ext1.eax, 4)) features |= kAvxVnni;

  const bool avx512 = saves(kZmmState) && bit(ext.ebx, 16) /*F*/ && bit(ext.ebx, 17) /*DQ*/ &&
                      bit(ext.ebx, 30) /*BW*/ && bit(ext.ebx, 31) /*VL*/;
  if (avx512) {
    features |= kAvx512;
    if (bit(ext.ecx, 11)) features |= kAvx512Vnni;
    if (bit(ext.ecx, 1)) features |= kAvx512Vbmi;
    if (bit(ext1.eax, 5)) features |= kAvx512Bf16;
  }

  if (saves(kTileState) && bit(ext.edx, 24) && request_tile_permission()) {
    features |= kAmxTile;
    if (bit(ext.edx, 25)) features |= kAmxInt8;
    if (bit(ext.edx, 22)) features |= kAmxBf16;
  }
  return features;
}

// Not a local static: a fork during its initialisation would leave it locked in the child.
constexpr uint64_t kUnknown = ~uint64_t{0};
std::atomic<uint64_t> g_features{kUnknown};

}  // namespace

uint32_t cpu_features() {
  uint64_t features = g_features.load(std::memory_order_relaxed);
  if (features == kUnknown) {
    features = detect();
    g_features.store(features, std::memory_order_relaxed);
  }
  return static_cast<uint32_t>(features);
}

std::string cpu_brand() {
  constexpr uint32_t kFirst = 0x80000002, kLast = 0x80000004;  // 3 leaves of 16 characters
  std::string brand;
  for (uint32_t leaf = kFirst; leaf <= kLast; ++leaf) {
    const Regs r = cpuid(leaf);
    char text[sizeof(Regs)];
    std::memcpy(text, &r, sizeof text);
    brand.append(text, sizeof text);
  }
  brand.erase(std::min(brand.find('\0'), brand.size()));
  const size_t first = brand.find_first_not_of(' ');
  if (first == brand.npos) return "unknown CPU";
  return brand.substr(first, brand.find_last_not_of(' ') - first + 1);
}

}  // namespace kt::sys
