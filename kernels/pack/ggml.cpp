#include "ggml.h"

#include <cstring>

#include "blocks.h"
#include "ggml_blocks.h"
#include "scalar.h"

namespace kt {
namespace {

constexpr int64_t kMostBlockBytes =
    MatrixLayout{WeightFormat::kQ6K, kTileRows, 256, 0}.block_bytes();

template <class T> T load(const uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// A row's blocks from the part's first column on.
const uint8_t* row_blocks(const MatrixLayout& layout, const MatrixSource& source, int64_t row) {
  const GgmlFormat f = ggml_format(layout.format);
  const int64_t stride = source.cols / f.block_cols * f.file_bytes;
  return static_cast<const uint8_t*>(source.weights.data) + row * stride +
         source.col0 / f.block_cols * f.file_bytes;
}

bool finite_fp16(uint16_t x) { return (x & 0x7c00) != 0x7c00; }

// Bits [shift, shift + bits) of the codes of 32 columns to one lane of `bits` steps.
template <int bits> void write_plane(const uint8_t* q, int shift, uint8_t* lane) {
  constexpr uint32_t kMask = 0x01010101u * ((1u << bits) - 1);
  constexpr int kQuads = 8 / bits;
  for (int step = 0; step < bits; ++step, lane += kStepBytes) {
    uint32_t word = 0;
    for (int j = 0; j < kQuads; ++j, q += 4)
      word |= (load<uint32_t>(q) >> shift & kMask) << bits * j;
    std::memcpy(lane, &word, 4);
  }
}

// Row n of a packed block.
template <int bits>
void write_row(const GgmlFormat& f, const GgmlBlock& b, int64_t n, uint8_t* dst) {
  std::memcpy(dst + n * 2, &b.d, 2);
  if (f.has_min) std::memcpy(dst + kTileRows * 2 + n * 2, &b.m, 2);
  uint8_t* scales = dst + f.d_bytes();
  uint8_t* steps = dst + f.scale_bytes();
  for (int i = 0; scales < steps; ++i, scales += kTileRows) scales[n] = b.scales[i];
  constexpr int kLow = low_plane_bits(bits);
  for (int k = 0; k < f.block_cols; k += 32, steps += f.part_bytes()) {
    write_plane<kLow>(b.q + k, 0, steps + n * 4);
    if constexpr (bits > kLow)
      write_plane<bits - kLow>(b.q + k, kLow, steps + kLow * kStepBytes + n * 4);
  }
}

void write_row(const GgmlFormat& f, const GgmlBlock& b, int64_t n, uint8_t* dst) {
  switch (f.bits) {
    case 2: return write_row<2>(f, b, n, dst);
    case 3: return write_row<3>(f, b, n, dst);
    case 4: return write_row<4>(f, b, n, dst);
    case 5: return write_row<5>(f, b, n, dst);
    case 6: return write_row<6>(f, b, n, dst);
    default: return write_row<8>(f, b, n, dst);
  }
}

}  // namespace

PackError check_ggml(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row) {
  const GgmlFormat f = ggml_format(layout.format);
  const int64_t first = source.row0 + tile * kTileRows;
  for (int64_t row = first; row < first + tile_rows(layout, tile); ++row) {
    const uint8_t* block = row_blocks(layout, source, row);
    for (int64_t k = 0; k < layout.cols; k += f.block_cols, block += f.file_bytes) {
      const uint8_t* d = ggml_d(layout.format, block);
      if (finite_fp16(load<uint16_t>(d)) && (!f.has_min || finite_fp16(load<uint16_t>(d + 2))))
        continue;
      *bad_row = row;
      return PackError::kBadBlockScale;
    }
  }
  return PackError::kNone;
}

void pack_ggml(const MatrixLayout& layout, const MatrixSource& source, int64_t tile, uint8_t* dst) {
  const GgmlFormat f = ggml_format(layout.format);
  const int64_t first = source.row0 + tile * kTileRows, rows = tile_rows(layout, tile);
  const int64_t bytes = layout.block_bytes();
  for (int64_t b = 0; b < layout.cols / f.block_cols; ++b, dst += bytes) {
    alignas(64) uint8_t stage[kMostBlockBytes];
    if (rows < kTileRows) std::memset(stage, 0, size_t(bytes));
    for (int64_t n = 0; n < rows; ++n) {
      const uint8_t* block = row_blocks(layout, source, first + n) + b * f.file_bytes;
      write_row(f, read_ggml_block(layout.format, block), n, stage);
    }
    stream_bytes(stage, bytes, dst);
  }
  stream_fence();
}

float ggml_weight(const MatrixLayout& layout, const uint8_t* tile, int64_t n, int64_t k) {
  const GgmlFormat f = ggml_format(layout.format);
  const uint8_t* block = tile + k / f.block_cols * layout.block_bytes();
  const int64_t column = k % f.block_cols, quad = column % 32 / 4;
  const uint8_t* lane = block + f.scale_bytes() + column / 32 * f.part_bytes() + n * 4 + column % 4;
  const auto bits_of = [&](int bits) {
    const int64_t quads = 8 / bits;
    return lane[quad / quads * kStepBytes] >> quad % quads * bits & ((1 << bits) - 1);
  };
  int q = bits_of(f.low_bits());
  if (f.bits > f.low_bits()) {
    lane += f.low_bits() * kStepBytes;
    q |= bits_of(f.bits - f.low_bits()) << f.low_bits();
  }
  q -= f.offset;
  if (layout.format == WeightFormat::kQ8_0) q = int8_t(q);
  if (layout.format == WeightFormat::kIQ4NL || layout.format == WeightFormat::kIQ4XS)
    q = kIq4Values[q];
  const float d = fp16_to_float(load<uint16_t>(block + n * 2));
  const float m = f.has_min ? fp16_to_float(load<uint16_t>(block + kTileRows * 2 + n * 2)) : 0;
  if (!f.sub_cols) return f.has_min ? d * float(q) + m : d * float(q);
  const uint8_t* sub = block + f.d_bytes() + column / f.sub_cols * f.sub_bytes() * kTileRows + n;
  if (!f.has_min) return d * float(int8_t(sub[0])) * float(q);
  const bool one_byte = f.sub_bytes() == 1;
  const int scale = one_byte ? sub[0] & 15 : sub[0],
            minimum = one_byte ? sub[0] >> 4 : sub[kTileRows];
  return d * float(scale) * float(q) - m * float(minimum);
}

}  // namespace kt
