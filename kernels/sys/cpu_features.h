// The instruction sets that this CPU and operating system can run.
#pragma once
#include <cstdint>
#include <string>

namespace kt::sys {

// Bits of KernelTable::features. kAvx2 is the package's minimum: AVX2, FMA, F16C, BMI2.
enum Feature : uint32_t {
  kAvx2 = 1u << 0,
  kAvx512 = 1u << 1,  // F, BW, DQ, VL
  kAvx512Vnni = 1u << 2,
  kAvx512Vbmi = 1u << 3,
  kAvx512Bf16 = 1u << 4,
  kAmxTile = 1u << 5,  // including the permission to use tile data
  kAmxInt8 = 1u << 6,
  kAmxBf16 = 1u << 7,
  kAvxVnni = 1u << 8,  // 256-bit VEX-encoded VNNI
};

// Detected by cpuid, XCR0 and arch_prctl(ARCH_REQ_XCOMP_PERM). Cached after the first call.
uint32_t cpu_features();
std::string cpu_brand();  // "AMD EPYC ...", from cpuid

}  // namespace kt::sys
