#include "blocks.h"

#include <immintrin.h>

#include <cstring>

namespace kt {

Window window(const ByteRows& rows, int64_t at, int64_t bytes, uint8_t* room) {
  if (rows.count == kTileRows && at + bytes <= rows.bytes) return {rows.first + at, rows.stride};
  std::memset(room, rows.pad, size_t(kTileRows * bytes));
  const int64_t have = std::clamp(rows.bytes - at, int64_t{0}, bytes);
  for (int64_t n = 0; n < rows.count && have > 0; ++n)
    std::memcpy(room + n * bytes, rows.first + n * rows.stride + at, size_t(have));
  return {room, bytes};
}

namespace {

constexpr int64_t kUnitSteps = 4;   // a unit is 16 bytes of each row, which become 4 steps
constexpr int64_t kChunkUnits = 4;  // a chunk is a cache line of each row
constexpr int64_t kUnitBytes = 16, kChunkBytes = kChunkUnits * kUnitBytes;
constexpr int64_t kMaxScaleBytes = kTileRows * 4 + 64;  // kInt4Zero with float32 scales

__m128i load(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
void store(uint8_t* p, __m128i x) { _mm_store_si128(reinterpret_cast<__m128i*>(p), x); }

template <int kSize> __m128i unpack_low(__m128i a, __m128i b) {
  if constexpr (kSize == 1) return _mm_unpacklo_epi8(a, b);
  if constexpr (kSize == 2) return _mm_unpacklo_epi16(a, b);
  return _mm_unpacklo_epi32(a, b);
}

template <int kSize> __m128i unpack_high(__m128i a, __m128i b) {
  if constexpr (kSize == 1) return _mm_unpackhi_epi8(a, b);
  if constexpr (kSize == 2) return _mm_unpackhi_epi16(a, b);
  return _mm_unpackhi_epi32(a, b);
}

// Transposes a square of values of kSize bytes. Interleaving the first half of the rows with the
// second rotates the bits of a value's position by one.
template <int kSize> void transpose(__m128i* row) {
  constexpr int kRows = 16 / kSize;
  for (int turn = kRows; turn > 1; turn /= 2) {
    __m128i to[kRows];
    for (int i = 0; i < kRows / 2; ++i) {
      to[2 * i] = unpack_low<kSize>(row[i], row[i + kRows / 2]);
      to[2 * i + 1] = unpack_high<kSize>(row[i], row[i + kRows / 2]);
    }
    for (int i = 0; i < kRows; ++i) row[i] = to[i];
  }
}

// Reads the values of a tile's rows, 16 bytes of each row at a time.
class ValueReader {
 public:
  explicit ValueReader(const BlockValues& values) : values_(values) {}

  // Copies the next block's values to dst, 32 rows of each value; returns the end.
  uint8_t* next_block(uint8_t* dst) {
    const int64_t bytes = kTileRows * values_.size;
    for (int64_t i = 0; i < values_.per_block; ++i, dst += bytes, used_ += bytes) {
      if (used_ == sizeof lanes_) refill();
      std::memcpy(dst, lanes_ + used_, size_t(bytes));
    }
    return dst;
  }

 private:
  void refill() {
    switch (values_.size) {
      case 1: transpose_window<1>(); break;
      case 2: transpose_window<2>(); break;
      default: transpose_window<4>(); break;
    }
    at_ += 16;
    used_ = 0;
  }

  template <int kSize> void transpose_window() {
    constexpr int kRows = 16 / kSize;
    uint8_t room[kTileRows * 16];
    const Window w = window(values_.rows, at_, 16, room);
    for (int64_t n = 0; n < kTileRows; n += kRows) {
      __m128i row[kRows];
      for (int i = 0; i < kRows; ++i) row[i] = load(w.first + (n + i) * w.stride);
      transpose<kSize>(row);
      for (int i = 0; i < kRows; ++i) store(lanes_ + (i * kTileRows + n) * kSize, row[i]);
    }
  }

  const BlockValues& values_;
  int64_t at_ = 0;  // offset in the rows' bytes
  alignas(16) uint8_t lanes_[kTileRows * 16];
  int64_t used_ = sizeof lanes_;
};

// Puts the lanes of two units in the order of their steps.
template <LaneOrder kOrder> __m256i in_order(__m256i x) {
  if constexpr (kOrder == LaneOrder::kPlain) return x;
  const __m256i pairs = _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15,  //
                                         0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  x = _mm256_shuffle_epi8(x, pairs);
  if constexpr (kOrder == LaneOrder::kPairs) return x;
  // A 16-bit half now holds nibbles 0 1 4 5 or 2 3 6 7; the middle two must be swapped.
  const __m256i nibbles =
      _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 4)), _mm256_set1_epi32(0x00f000f0));
  return _mm256_xor_si256(x, _mm256_xor_si256(nibbles, _mm256_slli_epi32(nibbles, 4)));
}

// Writes two units of four rows, side by side. Transposes the 4 x 4 lanes of each.
template <LaneOrder kOrder> void write_two(__m256i* row, uint8_t* first, uint8_t* second) {
  for (int i = 0; i < 4; ++i) row[i] = in_order<kOrder>(row[i]);
  const __m256i even_low = _mm256_unpacklo_epi32(row[0], row[2]);
  const __m256i even_high = _mm256_unpackhi_epi32(row[0], row[2]);
  const __m256i odd_low = _mm256_unpacklo_epi32(row[1], row[3]);
  const __m256i odd_high = _mm256_unpackhi_epi32(row[1], row[3]);
  const __m256i step[4] = {
      _mm256_unpacklo_epi32(even_low, odd_low), _mm256_unpackhi_epi32(even_low, odd_low),
      _mm256_unpacklo_epi32(even_high, odd_high), _mm256_unpackhi_epi32(even_high, odd_high)};
  for (int i = 0; i < 4; ++i) {
    store(first + i * kStepBytes, _mm256_castsi256_si128(step[i]));
    store(second + i * kStepBytes, _mm256_extracti128_si256(step[i], 1));
  }
}

// Writes the units of a chunk. Reads a cache line of each row.
template <LaneOrder kOrder> void write_units(Window w, int64_t units, uint8_t* const* place) {
  for (int64_t n = 0; n < kTileRows; n += 4) {
    const uint8_t* p = w.first + n * w.stride;
    __m256i row[4];
    for (int64_t u = 0; u + 2 <= units; u += 2) {
      for (int i = 0; i < 4; ++i)
        row[i] =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i * w.stride + u * kUnitBytes));
      write_two<kOrder>(row, place[u] + n * 4, place[u + 1] + n * 4);
    }
    if (units % 2) {
      uint8_t* const last = place[units - 1] + n * 4;
      for (int i = 0; i < 4; ++i)
        row[i] = _mm256_broadcastsi128_si256(load(p + i * w.stride + (units - 1) * kUnitBytes));
      write_two<kOrder>(row, last, last);
    }
  }
}

template <LaneOrder kOrder>
void write_all(const MatrixLayout& layout, const ByteRows& lanes, const BlockValues& scales,
               const BlockValues& zeros, uint8_t* tile) {
  const int64_t units = layout.cols_padded() / layout.step_cols() / kUnitSteps;
  const int64_t scale_bytes = layout.block_scale_bytes();
  const int64_t block_units = layout.block_cols() / layout.step_cols() / kUnitSteps;
  ValueReader scale_reader(scales), zero_reader(zeros);
  uint8_t* dst = tile + layout.head_bytes();
  for (int64_t u = 0; u < units; u += kChunkUnits) {
    alignas(64) uint8_t stage[kChunkUnits * (kMaxScaleBytes + kUnitSteps * kStepBytes)];
    uint8_t *end = stage, *place[kChunkUnits];
    const int64_t here = std::min(kChunkUnits, units - u);
    for (int64_t i = 0; i < here; ++i) {
      if (scale_bytes && (u + i) % block_units == 0) {
        uint8_t* values_end = zero_reader.next_block(scale_reader.next_block(end));
        std::memset(values_end, 0, size_t(end + scale_bytes - values_end));
        end += scale_bytes;
      }
      place[i] = end;
      end += kUnitSteps * kStepBytes;
    }
    alignas(16) uint8_t room[kTileRows * kChunkBytes];
    write_units<kOrder>(window(lanes, u * kUnitBytes, here * kUnitBytes, room), here, place);
    stream_bytes(stage, end - stage, dst);
    dst += end - stage;
  }
  stream_fence();
}

}  // namespace

void stream_bytes(const uint8_t* src, int64_t bytes, uint8_t* dst) {
  for (int64_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
}

void stream_fence() { _mm_sfence(); }

void write_blocks(const MatrixLayout& layout, const ByteRows& lanes, LaneOrder order,
                  const BlockValues& scales, const BlockValues& zeros, uint8_t* tile) {
  switch (order) {
    case LaneOrder::kPlain: return write_all<LaneOrder::kPlain>(layout, lanes, scales, zeros, tile);
    case LaneOrder::kPairs: return write_all<LaneOrder::kPairs>(layout, lanes, scales, zeros, tile);
    default: return write_all<LaneOrder::kNibbles>(layout, lanes, scales, zeros, tile);
  }
}

}  // namespace kt
