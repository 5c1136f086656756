#include "ggml.h"

#include <cstring>
#include <utility>

#include "blocks.h"
#include "ggml_blocks.h"
#include "scalar.h"

namespace kt {
namespace {

bool finite_fp16(uint16_t x) { return (x & 0x7c00) != 0x7c00; }

// Moves bits [shift, shift + bits) of the codes of 32 columns to one lane of `bits` steps.
template <int bits> void write_plane(const uint8_t* q, int shift, uint8_t* lane) {
  if constexpr (bits == 8) {
    for (int step = 0; step < bits; ++step) std::memcpy(lane + step * kStepBytes, q + 4 * step, 4);
  } else {  // two quads at a time: those of a step in the halves of a word, then combined
    constexpr uint64_t kMask = 0x0101010101010101u * ((1u << bits) - 1);
    for (int step = 0; step < bits; ++step, lane += kStepBytes) {
      uint64_t both = 0;
      for (int j = 0; j < 8; j += 2 * bits, q += 8)
        both |= (load<uint64_t>(q) >> shift & kMask) << j;
      const uint32_t word = uint32_t(both) | uint32_t(both >> 32) << bits;
      std::memcpy(lane, &word, 4);
    }
  }
}

// Writes row n of a packed block.
template <WeightFormat format> void write_row(const GgmlBlock& b, int64_t n, uint8_t* dst) {
  constexpr const FormatTraits& f = traits_of(format);
  constexpr int kLow = low_plane_bits(f.codes.bits), kHigh = f.codes.bits - kLow;
  std::memcpy(dst + n * 2, &b.d, 2);
  if constexpr (f.scales.minimum) std::memcpy(dst + kTileRows * 2 + n * 2, &b.m, 2);
  uint8_t *scales = dst + f.d_bytes(), *steps = dst + f.scale_bytes;
  for (int i = 0; scales < steps; ++i, scales += kTileRows) scales[n] = b.scales[i];
  for (int k = 0; k < f.block_cols; k += 32, steps += f.part_bytes()) {
    write_plane<kLow>(b.q + k, 0, steps + n * 4);
    if constexpr (kHigh > 0) write_plane<kHigh>(b.q + k, kLow, steps + kLow * kStepBytes + n * 4);
  }
}

// Packs the blocks of a matrix's part, by format.
template <WeightFormat format> struct Blocks {
  static constexpr const FormatTraits& f = traits_of(format);
  static constexpr int64_t kPackedBytes =
      MatrixLayout{format, kTileRows, f.block_cols, 0}.block_bytes();
  const MatrixLayout& layout;
  const MatrixSource& source;
  const int64_t count = layout.cols / f.block_cols;  // of a row

  const uint8_t* of_row(int64_t row) const {
    const int64_t stride = source.cols / f.block_cols * f.file_bytes;
    return static_cast<const uint8_t*>(source.weights.data) + row * stride +
           source.col0 / f.block_cols * f.file_bytes;
  }

  bool finite(int64_t row) const {
    const uint8_t* d = of_row(row) + ggml_file_block(format).d;
    bool all = true;
    for (int64_t i = 0; i < count; ++i, d += f.file_bytes) {
      all &= finite_fp16(load<uint16_t>(d));
      if constexpr (f.scales.minimum) all &= finite_fp16(load<uint16_t>(d + 2));
    }
    return all;
  }

  void pack(int64_t first, int64_t rows, uint8_t* dst) const {
    alignas(64) uint8_t stage[kPackedBytes] = {};  // includes padding
    for (int64_t b = 0; b < count; ++b, dst += kPackedBytes) {
      const uint8_t* block = of_row(first) + b * f.file_bytes;
      const int64_t stride = source.cols / f.block_cols * f.file_bytes;
      for (int64_t n = 0; n < rows; ++n, block += stride)
        write_row<format>(read_ggml_block<format>(block), n, stage);
      stream_bytes(stage, kPackedBytes, dst);
    }
    stream_fence();
  }
};

// Calls use(Blocks<format>{}) for the layout's format.
template <class Use, int... formats>
void with_blocks(const MatrixLayout& layout, const MatrixSource& source, const Use& use,
                 std::integer_sequence<int, formats...>) {
  const auto try_format = [&]<WeightFormat format>() {
    if constexpr (is_ggml(format))
      if (layout.format == format) use(Blocks<format>{layout, source});
  };
  (try_format.template operator()<WeightFormat(formats)>(), ...);
}
using AllFormats = std::make_integer_sequence<int, kFormatCount>;

}  // namespace

PackError check_ggml(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row) {
  const int64_t first = source.row0 + tile * kTileRows;
  PackError error = PackError::kNone;
  with_blocks(
      layout, source,
      [&](const auto& blocks) {
        for (int64_t row = first; row < first + tile_rows(layout, tile); ++row) {
          if (blocks.finite(row)) continue;
          *bad_row = row;
          error = PackError::kBadBlockScale;
          return;
        }
      },
      AllFormats{});
  return error;
}

void pack_ggml(const MatrixLayout& layout, const MatrixSource& source, int64_t tile, uint8_t* dst) {
  with_blocks(
      layout, source,
      [&](const auto& blocks) {
        blocks.pack(source.row0 + tile * kTileRows, tile_rows(layout, tile), dst);
      },
      AllFormats{});
}

float ggml_weight(const MatrixLayout& layout, const uint8_t* tile, int64_t n, int64_t k) {
  const FormatTraits& f = layout.traits();
  const FormatTraits::Scales& scales = f.scales;
  const int bits = f.codes.bits, low = low_plane_bits(bits);
  const uint8_t* block = tile + k / f.block_cols * layout.block_bytes();
  const int64_t column = k % f.block_cols, quad = column % 32 / 4;
  const uint8_t* lane = block + f.scale_bytes + column / 32 * f.part_bytes() + n * 4 + column % 4;
  const auto plane = [&](int width) {
    const int64_t quads = 8 / width;
    return lane[quad / quads * kStepBytes] >> quad % quads * width & ((1 << width) - 1);
  };
  int q = plane(low);
  if (bits > low) {
    lane += low * kStepBytes;
    q |= plane(bits - low) << low;
  }
  q -= f.codes.offset;
  if (f.codes.type == CodeType::kSigned) q = int8_t(q);
  if (f.codes.type == CodeType::kIq4) q = kIq4Values[q];
  const float d = fp16_to_float(load<uint16_t>(block + n * 2));
  const float m = scales.minimum ? fp16_to_float(load<uint16_t>(block + kTileRows * 2 + n * 2)) : 0;
  if (!scales.cols) return scales.minimum ? d * float(q) + m : d * float(q);
  const uint8_t* sub = block + f.d_bytes() + column / scales.cols * f.sub_bytes() * kTileRows + n;
  if (!scales.minimum) return d * float(int8_t(sub[0])) * float(q);
  const bool one_byte = f.sub_bytes() == 1;
  const int scale = one_byte ? sub[0] & 15 : sub[0],
            minimum = one_byte ? sub[0] >> 4 : sub[kTileRows];
  return d * float(scale) * float(q) - m * float(minimum);
}

}  // namespace kt
