// AMX tiles in plain memory, for tests only: the _tile_* intrinsics of AMX-TILE, AMX-INT8 and
// AMX-BF16 on eight thread-local 16 x 64 byte tiles. Include it after emul512.h, with the flags
// given there and -O3 (the products are written for the vectoriser).
//
// Where the processor would raise #GP or #UD (missing or malformed configuration, shapes that do
// not fit, a tile used twice in one product), the emulation prints a line and aborts. A kernel that
// passes its tests here would not fault there. Loads clear the rows and bytes outside the
// configured shape.
//
//   dpb{ss,su,us,uu}d  dst.i32[m][n] += sum over k, i < 4 of a.byte[m][4k+i] * b.byte[k][4n+i];
//                      exact, wrapping at 32 bits.
//   dpbf16ps           Two float32 sums per element, of the even and of the odd products, each an
//                      FMA chain from +0 in ascending k; dst += even + odd (two more roundings).
//                      Nearest-even; denormal inputs and results are treated as zero; MXCSR is
//                      ignored.
#pragma once
#ifndef KT_EMULATE
#error "emul_amx.h is for the emulated test build: compile with -DKT_EMULATE"
#endif

#include <stdio.h>
#include <stdlib.h>

#include "emul512.h"

namespace kt_emul {
namespace {

struct TileConfig {  // the 64 bytes of LDTILECFG
  uint8_t palette, start_row, reserved[14];
  uint16_t colsb[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

struct Tiles {
  TileConfig config;  // palette 0: not configured
  alignas(64) uint8_t data[8][16][64];
};
thread_local Tiles tiles;

[[noreturn]] void refuse(const char* instruction, const char* why) {
  fprintf(stderr, "emulated %s would fault: %s\n", instruction, why);
  abort();
}
inline void require(bool ok, const char* instruction, const char* why) {
  if (!ok) refuse(instruction, why);
}

inline int rows(int t) { return tiles.config.rows[t]; }
inline int colsb(int t) { return tiles.config.colsb[t]; }

inline void require_tile(int t, const char* instruction) {
  require(tiles.config.palette == 1, instruction, "tiles are not configured");
  require(t >= 0 && t < 8, instruction, "no such tile");
  require(rows(t) > 0 && colsb(t) > 0, instruction, "this tile is not configured");
}

inline void require_product(int d, int a, int b, const char* instruction) {
  require_tile(d, instruction);
  require_tile(a, instruction);
  require_tile(b, instruction);
  require(d != a && d != b && a != b, instruction, "the three tiles must differ");
  require(colsb(d) % 4 == 0 && colsb(a) % 4 == 0 && colsb(b) % 4 == 0, instruction,
          "bytes per row must be multiples of 4");
  require(rows(d) == rows(a), instruction, "rows of dst and a differ");
  require(colsb(d) == colsb(b), instruction, "columns of dst and b differ");
  require(colsb(a) == 4 * rows(b), instruction, "columns of a do not match rows of b");
}

inline void load(int t, const void* base, int64_t stride, const char* instruction) {
  require_tile(t, instruction);
  memset(tiles.data[t], 0, sizeof tiles.data[t]);
  for (int r = 0; r < rows(t); ++r)
    memcpy(tiles.data[t][r], static_cast<const char*>(base) + r * stride,
           static_cast<size_t>(colsb(t)));
}

// Even or odd bytes of each dword, widened to the two 16-bit lanes that vpmaddwd multiplies.
template <bool kSigned> inline __attribute__((always_inline)) __m256i even_bytes(__m256i x) {
  return kSigned ? _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8)
                 : _mm256_and_si256(x, _mm256_set1_epi16(0x00ff));
}
template <bool kSigned> inline __attribute__((always_inline)) __m256i odd_bytes(__m256i x) {
  return kSigned ? _mm256_srai_epi16(x, 8) : _mm256_srli_epi16(x, 8);
}

// Bytes outside the configured shape are zero in all three tiles, so whole rows are computed.
template <bool kSignedA, bool kSignedB>
void int8_product(int d, int a, int b, const char* instruction) {
  require_product(d, a, b, instruction);
  const int m_rows = rows(d), k_rows = rows(b);
  for (int half = 0; half < 2; ++half) {
    __m256i acc[16];
    for (int m = 0; m < m_rows; ++m)
      acc[m] = _mm256_load_si256(reinterpret_cast<__m256i*>(tiles.data[d][m]) + half);
    for (int k = 0; k < k_rows; ++k) {
      const __m256i bk = _mm256_load_si256(reinterpret_cast<__m256i*>(tiles.data[b][k]) + half);
      const __m256i b_even = even_bytes<kSignedB>(bk), b_odd = odd_bytes<kSignedB>(bk);
      for (int m = 0; m < m_rows; ++m) {
        int32_t four;
        memcpy(&four, tiles.data[a][m] + 4 * k, 4);
        const __m256i am = _mm256_set1_epi32(four);
        const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(even_bytes<kSignedA>(am), b_even),
                                             _mm256_madd_epi16(odd_bytes<kSignedA>(am), b_odd));
        acc[m] = _mm256_add_epi32(acc[m], sum);
      }
    }
    for (int m = 0; m < m_rows; ++m)
      _mm256_store_si256(reinterpret_cast<__m256i*>(tiles.data[d][m]) + half, acc[m]);
  }
}

// Arithmetic under kFlushDenormals. Volatile, so that the compiler keeps it between the two MXCSR
// writes around a product.
inline __attribute__((always_inline)) void fma_flushed(__m256& acc, __m256i a, __m256i b) {
  asm volatile("vfmadd231ps %1, %2, %0" : "+x"(acc) : "x"(a), "x"(b));
}
inline __attribute__((always_inline)) void add_flushed(__m256& acc, __m256 x) {
  asm volatile("vaddps %1, %0, %0" : "+x"(acc) : "x"(x));
}

inline void bf16_product(int d, int a, int b) {
  require_product(d, a, b, "tdpbf16ps");
  const int m_rows = rows(d), k_rows = rows(b);
  unsigned saved = 0;
  const unsigned mode = kFlushDenormals;
  asm volatile("vstmxcsr %0\n\tvldmxcsr %1" : "=&m"(saved) : "m"(mode));
  for (int m = 0; m < m_rows; ++m) {
    __m256 even0{}, even1{}, odd0{}, odd1{};
    for (int k = 0; k < k_rows; ++k) {
      int32_t two;
      memcpy(&two, tiles.data[a][m] + 4 * k, 4);
      const __m256i am = _mm256_set1_epi32(two);
      const __m256i* bk = reinterpret_cast<const __m256i*>(tiles.data[b][k]);
      const __m256i b0 = _mm256_load_si256(bk), b1 = _mm256_load_si256(bk + 1);
      fma_flushed(even0, bf16_even(am), bf16_even(b0));
      fma_flushed(even1, bf16_even(am), bf16_even(b1));
      fma_flushed(odd0, bf16_odd(am), bf16_odd(b0));
      fma_flushed(odd1, bf16_odd(am), bf16_odd(b1));
    }
    add_flushed(even0, odd0);
    add_flushed(even1, odd1);
    float* out = reinterpret_cast<float*>(tiles.data[d][m]);
    __m256 d0 = _mm256_load_ps(out), d1 = _mm256_load_ps(out + 8);
    add_flushed(d0, even0);
    add_flushed(d1, even1);
    _mm256_store_ps(out, d0);
    _mm256_store_ps(out + 8, d1);
  }
  asm volatile("vldmxcsr %0" : : "m"(saved));
  // Zero padding times a number is zero, but times a NaN of a it is NaN, so it must be cleared.
  if (colsb(d) < 64)
    for (int m = 0; m < m_rows; ++m)
      memset(tiles.data[d][m] + colsb(d), 0, static_cast<size_t>(64 - colsb(d)));
}

}  // namespace
}  // namespace kt_emul

static inline void kt_tile_release() {
  kt_emul::tiles.config = {};
  memset(kt_emul::tiles.data, 0, sizeof kt_emul::tiles.data);
}
static inline void kt_tile_loadconfig(const void* config) {
  kt_emul::TileConfig c;
  memcpy(&c, config, sizeof c);
  kt_tile_release();
  if (c.palette == 0) return;
  kt_emul::require(c.palette == 1, "ldtilecfg", "palette is neither 0 nor 1");
  for (uint8_t byte : c.reserved) kt_emul::require(byte == 0, "ldtilecfg", "reserved byte set");
  for (int t = 0; t < 16; ++t) {
    kt_emul::require(t < 8 || (c.rows[t] == 0 && c.colsb[t] == 0), "ldtilecfg", "tile past 7");
    kt_emul::require(c.rows[t] <= 16 && c.colsb[t] <= 64, "ldtilecfg", "tile too large");
    kt_emul::require((c.rows[t] == 0) == (c.colsb[t] == 0), "ldtilecfg",
                     "rows and bytes per row must both be zero or neither");
  }
  kt_emul::tiles.config = c;
}
static inline void kt_tile_storeconfig(void* config) {
  memcpy(config, &kt_emul::tiles.config, sizeof kt_emul::tiles.config);
}
static inline void kt_tile_zero(int t) {
  kt_emul::require_tile(t, "tilezero");
  memset(kt_emul::tiles.data[t], 0, sizeof kt_emul::tiles.data[t]);
}
static inline void kt_tile_loadd(int t, const void* base, int64_t stride) {
  kt_emul::load(t, base, stride, "tileloadd");
}
static inline void kt_tile_stored(int t, void* base, int64_t stride) {
  kt_emul::require_tile(t, "tilestored");
  for (int r = 0; r < kt_emul::rows(t); ++r)
    memcpy(static_cast<char*>(base) + r * stride, kt_emul::tiles.data[t][r],
           static_cast<size_t>(kt_emul::colsb(t)));
}
static inline void kt_tile_dpbssd(int d, int a, int b) {
  kt_emul::int8_product<true, true>(d, a, b, "tdpbssd");
}
static inline void kt_tile_dpbsud(int d, int a, int b) {
  kt_emul::int8_product<true, false>(d, a, b, "tdpbsud");
}
static inline void kt_tile_dpbusd(int d, int a, int b) {
  kt_emul::int8_product<false, true>(d, a, b, "tdpbusd");
}
static inline void kt_tile_dpbuud(int d, int a, int b) {
  kt_emul::int8_product<false, false>(d, a, b, "tdpbuud");
}
static inline void kt_tile_dpbf16ps(int d, int a, int b) { kt_emul::bf16_product(d, a, b); }

// The names used by the kernels; the compiler's own are functions or macros.
#undef _tile_loadconfig
#define _tile_loadconfig kt_tile_loadconfig
#undef _tile_storeconfig
#define _tile_storeconfig kt_tile_storeconfig
#undef _tile_release
#define _tile_release kt_tile_release
#undef _tile_zero
#define _tile_zero kt_tile_zero
#undef _tile_loadd
#define _tile_loadd kt_tile_loadd
#undef _tile_stream_loadd
#define _tile_stream_loadd kt_tile_loadd
#undef _tile_stored
#define _tile_stored kt_tile_stored
#undef _tile_dpbssd
#define _tile_dpbssd kt_tile_dpbssd
#undef _tile_dpbsud
#define _tile_dpbsud kt_tile_dpbsud
#undef _tile_dpbusd
#define _tile_dpbusd kt_tile_dpbusd
#undef _tile_dpbuud
#define _tile_dpbuud kt_tile_dpbuud
#undef _tile_dpbf16ps
#define _tile_dpbf16ps kt_tile_dpbf16ps
