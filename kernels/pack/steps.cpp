#include "steps.h"

#include <emmintrin.h>

namespace kt {
namespace {

constexpr int64_t kUnitSteps = 4;   // a unit: 16 bytes of each row become 4 steps
constexpr int64_t kChunkUnits = 4;  // a chunk: a cache line of each row
constexpr int64_t kUnitBytes = 16, kChunkBytes = kChunkUnits * kUnitBytes;

template <LaneOrder kOrder> __m128i load_lanes(const uint8_t* p) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (kOrder == LaneOrder::kPlain) return x;
  // Bytes 1 and 2 of each lane change places.
  const __m128i bytes =
      _mm_and_si128(_mm_xor_si128(x, _mm_srli_epi32(x, 8)), _mm_set1_epi32(0xff00));
  x = _mm_xor_si128(x, _mm_xor_si128(bytes, _mm_slli_epi32(bytes, 8)));
  if constexpr (kOrder == LaneOrder::kPairs) return x;
  // Now a 16-bit half holds nibbles 0 1 4 5 or 2 3 6 7: its middle two change places.
  const __m128i nibbles =
      _mm_and_si128(_mm_xor_si128(x, _mm_srli_epi32(x, 4)), _mm_set1_epi32(0x00f000f0));
  return _mm_xor_si128(x, _mm_xor_si128(nibbles, _mm_slli_epi32(nibbles, 4)));
}

void store(uint8_t* p, __m128i x) { _mm_store_si128(reinterpret_cast<__m128i*>(p), x); }

// The units of a chunk, of 32 rows, to their places. Lanes are transposed four rows at a time.
template <LaneOrder kOrder>
void write_units(const uint8_t* rows, int64_t stride, int64_t units, uint8_t* const* place) {
  for (int64_t n = 0; n < kTileRows; n += 4, rows += 4 * stride)
    for (int64_t u = 0; u < units; ++u) {
      const uint8_t* p = rows + u * kUnitBytes;
      const __m128i a = load_lanes<kOrder>(p), b = load_lanes<kOrder>(p + stride);
      const __m128i c = load_lanes<kOrder>(p + 2 * stride), d = load_lanes<kOrder>(p + 3 * stride);
      const __m128i ab01 = _mm_unpacklo_epi32(a, b), ab23 = _mm_unpackhi_epi32(a, b);
      const __m128i cd01 = _mm_unpacklo_epi32(c, d), cd23 = _mm_unpackhi_epi32(c, d);
      uint8_t* dst = place[u] + n * 4;
      store(dst, _mm_unpacklo_epi64(ab01, cd01));
      store(dst + kStepBytes, _mm_unpackhi_epi64(ab01, cd01));
      store(dst + 2 * kStepBytes, _mm_unpacklo_epi64(ab23, cd23));
      store(dst + 3 * kStepBytes, _mm_unpackhi_epi64(ab23, cd23));
    }
}

// The places of a tile's units, in ascending order.
class Places {
 public:
  Places(const MatrixLayout& layout, uint8_t* tile)
      : scale_bytes_(layout.block_scale_bytes()),
        block_units_(layout.block_cols() / layout.step_cols() / kUnitSteps),
        left_(block_units_),
        next_(tile + layout.head_bytes() + scale_bytes_) {}

  uint8_t* next() {
    uint8_t* unit = next_;
    next_ += kUnitSteps * kStepBytes;
    if (--left_ == 0) {  // blocks without scales are shorter than a unit: nothing lies between
      next_ += scale_bytes_;
      left_ = block_units_;
    }
    return unit;
  }

 private:
  int64_t scale_bytes_, block_units_, left_;
  uint8_t* next_;
};

template <LaneOrder kOrder>
void write_all(const MatrixLayout& layout, const ByteRows& rows, uint8_t* tile) {
  const int64_t units = layout.cols_padded() / layout.step_cols() / kUnitSteps;
  Places places(layout, tile);
  for (int64_t u = 0; u < units; u += kChunkUnits) {
    const int64_t here = std::min(kChunkUnits, units - u), at = u * kUnitBytes;
    uint8_t* place[kChunkUnits];
    for (int64_t i = 0; i < here; ++i) place[i] = places.next();
    if (rows.count == kTileRows && at + here * kUnitBytes <= rows.bytes) {
      write_units<kOrder>(rows.first + at, rows.stride, here, place);
      continue;
    }
    uint8_t padded[kTileRows * kChunkBytes];
    std::memset(padded, rows.pad, sizeof padded);
    const int64_t bytes = std::clamp(rows.bytes - at, int64_t{0}, kChunkBytes);
    for (int64_t n = 0; n < rows.count; ++n)
      std::memcpy(padded + n * kChunkBytes, rows.first + n * rows.stride + at, size_t(bytes));
    write_units<kOrder>(padded, kChunkBytes, here, place);
  }
}

}  // namespace

void write_steps(const MatrixLayout& layout, const ByteRows& rows, LaneOrder order, uint8_t* tile) {
  switch (order) {
    case LaneOrder::kPlain: return write_all<LaneOrder::kPlain>(layout, rows, tile);
    case LaneOrder::kPairs: return write_all<LaneOrder::kPairs>(layout, rows, tile);
    case LaneOrder::kNibbles: return write_all<LaneOrder::kNibbles>(layout, rows, tile);
  }
}

}  // namespace kt
