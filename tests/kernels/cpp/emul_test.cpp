// Compares the emulated AVX-512 and AMX intrinsics with the real instructions and with scalar
// definitions. This file is compiled twice and linked (by test_emul.py):
//   with -DKT_EMULATE -mavx2 -mfma -mf16c -mbmi2:
//            every CASE of emul/*.inl through kernels/isa/emul/
//   without: every CASE through the real intrinsics, the scalar definitions, and main().
// A CASE runs on random and extreme inputs. The real side only runs if the CPU has the instructions
// (SKIP lines list what did not run); the scalar side runs everywhere.
//   emul_test [--iterations N]   exit status 1 if any output differs
//   emul_test --fault NAME       does what a processor refuses with #GP or #UD; must abort
#include "emul/cases.h"

#include "emul/simde.inl"

#include "emul/arithmetic.inl"
#include "emul/bf16.inl"
#include "emul/compare.inl"
#include "emul/convert.inl"
#include "emul/dot.inl"
#include "emul/memory.inl"
#include "emul/reduce.inl"
#include "emul/shuffle.inl"

#include "emul/amx.inl"  // after bf16.inl

#ifndef KT_EMULATE
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "emul/inputs.h"

static bool same(const Output& x, const Output& y, Kind kind, int* at) {
  for (int i = 0; i < 256; ++i) {
    const auto u = get<uint32_t>(x.v, i), v = get<uint32_t>(y.v, i);
    const bool nans = std::isnan(get<float>(x.v, i)) && std::isnan(get<float>(y.v, i));
    if (u != v && !(kind == kFloats && nans)) {
      *at = i;
      return false;
    }
  }
  return true;
}

static const Case* find(const CaseList& list, const char* name) {
  for (int i = 0; i < list.count; ++i)
    if (strcmp(list.at[i].name, name) == 0) return &list.at[i];
  return nullptr;
}

// Runs both sides on the same inputs. Returns the number of inputs on which they differ.
static int compare(const Case& one, Function other, const char* what, int iterations,
                   const uint8_t* edge) {
  static Input in;
  static Output x, y;
  in.edge = edge;
  int bad = 0;
  for (int n = 0; n < iterations; ++n) {
    make_input(in, n % kPatterns);
    memset(x.v, 0xaa, sizeof x.v);
    memset(y.v, 0xaa, sizeof y.v);
    one.run(in, x);
    other(in, y);
    int at = 0;
    if (!same(x, y, one.kind, &at) && bad++ == 0)
      printf("FAIL %s: pattern %d, dword %d: emulated %08x, %s %08x (a %08x, b %08x, c %08x)\n",
             one.name, n % kPatterns, at, get<uint32_t>(x.v, at), what, get<uint32_t>(y.v, at),
             get<uint32_t>(in.a, at), get<uint32_t>(in.b, at), get<uint32_t>(in.c, at));
  }
  return bad;
}

static bool amx_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

static bool have(Feature f) {
  __builtin_cpu_init();
  const bool base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  unsigned a = 0, b = 0, c = 0, leaf7 = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &leaf7);
  constexpr unsigned kBf16Bit = 1u << 22, kTileBit = 1u << 24, kInt8Bit = 1u << 25;
  switch (f) {
    case kF512: return base;
    case kVNNI: return base && __builtin_cpu_supports("avx512vnni");
    case kVBMI: return base && __builtin_cpu_supports("avx512vbmi");
    case kBF16: return base && __builtin_cpu_supports("avx512bf16");
    case kAmxInt8: return base && (leaf7 & kTileBit) && (leaf7 & kInt8Bit) && amx_permitted();
    default: return base && (leaf7 & kTileBit) && (leaf7 & kBf16Bit) && amx_permitted();
  }
}

int main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "--fault") == 0) {
    emulated_fault(argv[2]);
    return 0;
  }
  const int iterations = argc == 3 && strcmp(argv[1], "--iterations") == 0 ? atoi(argv[2]) : 240;
  if (argc != 1 && (argc != 3 || iterations <= 0)) {
    fprintf(stderr, "usage: emul_test [--iterations N], N > 0\n");
    return 2;
  }
  const long page = sysconf(_SC_PAGESIZE);
  void* map = mmap(nullptr, static_cast<size_t>(2 * page), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return perror("mmap"), 2;
  uint8_t* edge = static_cast<uint8_t*>(map) + page;
  for (int i = -256; i < 0; ++i) edge[i] = static_cast<uint8_t>(i * 7);
  if (mprotect(edge, static_cast<size_t>(page), PROT_NONE) != 0) return perror("mprotect"), 2;

  static const char* const kNames[kFeatures] = {"AVX-512 F/BW/DQ/VL", "VNNI",    "VBMI", "BF16",
                                                "AMX-INT8",           "AMX-BF16"};
  bool present[kFeatures];
  int real[kFeatures] = {}, skipped[kFeatures] = {}, defined = 0, failed = 0;
  for (int f = 0; f < kFeatures; ++f) present[f] = have(static_cast<Feature>(f));
  for (int i = 0; i < emulated_cases.count; ++i) {
    const Case& c = emulated_cases.at[i];
    if (const Case* scalar = find(scalar_cases, c.name)) {
      ++defined;
      failed += compare(c, scalar->run, "defined", iterations, edge) > 0;
    }
    if (!present[c.feature]) {
      ++skipped[c.feature];
      continue;
    }
    ++real[c.feature];
    failed += compare(c, find(real_cases, c.name)->run, "real", iterations, edge) > 0;
  }
  for (int f = 0; f < kFeatures; ++f) {
    if (present[f])
      printf("%s: %d cases against the real instruction\n", kNames[f], real[f]);
    else
      printf("SKIP %s: not on this CPU, %d cases not compared with the real instruction\n",
             kNames[f], skipped[f]);
  }
  printf("%d cases, %d with a scalar definition, %d comparisons failed\n", emulated_cases.count,
         defined, failed);
  return failed != 0;
}
#endif
