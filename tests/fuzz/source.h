// Matrices for the fuzzers: mostly ones that their format accepts, with extreme values, and with a
// few bytes changed at random.
#pragma once
#include <memory>

#include "input.h"
#include "reference.h"

namespace fuzz {

enum class Style { kOrdinary, kAnyFinite, kExtreme, kAnyBits };

inline Style style(Input& in) {
  const uint8_t x = in.byte() % 8;
  return x < 4   ? Style::kOrdinary
         : x < 6 ? Style::kAnyFinite
         : x < 7 ? Style::kExtreme
                 : Style::kAnyBits;
}

// Fills floats of a type, without sign if they are scales that have none.
inline void fill_floats(Random& random, Style style, DType type, bool sign, uint8_t* p,
                        int64_t count) {
  const int size = kt::dtype_bytes(type);
  const int mantissa = type == DType::kBF16 ? 7 : type == DType::kFP16 ? 10 : 23;
  const uint32_t infinity = (type == DType::kFP16 ? 31u : 255u) << mantissa;
  const uint32_t one = (type == DType::kFP16 ? 15u : 127u) << mantissa;
  const uint32_t extremes[] = {0, 1, (1u << mantissa) - 1, 1u << mantissa, one, infinity - 1};
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t r = random.next();
    uint32_t x = uint32_t(r);
    switch (style) {
      case Style::kOrdinary:
        x = (one - (uint32_t(r >> 32 & 7) << mantissa)) | (x & ((1u << mantissa) - 1));
        break;
      case Style::kAnyFinite: x %= infinity; break;
      case Style::kExtreme: x = extremes[r % 6]; break;
      case Style::kAnyBits: break;
    }
    if (style != Style::kAnyBits) {
      const uint32_t minus = 1u << (8 * size - 1);
      x &= minus - 1;
      if (sign && r >> 63) x |= minus;
    }
    std::memcpy(p + i * size, &x, size_t(size));
  }
}

// The form of a matrix, with sizes that fit it.
inline MatrixLayout form(Input& in) {
  const auto format = WeightFormat(in.below(kt::kFormatCount));
  constexpr int kGroups[] = {32, 64, 96, 128, 256, 32};
  const MatrixLayout probe{format, 1, 1, 0};
  const int group = probe.has_group() ? kGroups[in.below(6)] : 0;
  return {format, 1, 1, group, ScaleType(in.below(3))};
}

// A whole matrix in its own memory.
struct Matrix {
  std::unique_ptr<Bytes> data, scale, zero;
  kt::WeightSource weights{};

  void dense(Input& in, DType type, int64_t rows, int64_t cols) {
    Random random(in.word());
    data = std::make_unique<Bytes>(rows * cols * kt::dtype_bytes(type), int(in.below(2)));
    fill_floats(random, style(in), type, true, data->data(), rows * cols);
    data->patch(in, int(in.below(4)));
    weights = {data->data(), type};
  }

  void quantised(Input& in, const MatrixLayout& layout, int64_t rows, int64_t cols) {
    Random random(in.word());
    const int shift = int(in.below(2));
    const Style scales = style(in);
    const auto make = [&](std::unique_ptr<Bytes>& to, int64_t bytes) {
      to = std::make_unique<Bytes>(bytes, shift);
      random.fill(to->data(), bytes);
    };
    const auto float_scales = [&](DType type, bool sign, int64_t count) {
      make(scale, count * kt::dtype_bytes(type));
      fill_floats(random, scales, type, sign, scale->data(), count);
    };
    const auto byte_scales = [&](int64_t count, int most) {
      make(scale, count);
      for (int64_t i = 0; i < count && scales != Style::kAnyBits; ++i)
        scale->data()[i] = uint8_t(scale->data()[i] % (most + 1));
    };
    const auto codes = [&](int64_t bytes, bool e4m3_codes) {
      make(data, bytes);
      for (int64_t i = 0; i < bytes && e4m3_codes; ++i)
        if ((data->data()[i] & 127) == 127) data->data()[i] ^= 1;
    };
    weights.global = 1;
    switch (layout.format) {
      case WeightFormat::kBF16: return dense(in, DType::kBF16, rows, cols);
      case WeightFormat::kInt8Row:
      case WeightFormat::kFp8Row:
        codes(rows * cols, layout.format == WeightFormat::kFp8Row);
        float_scales(DType::kFP32, false, rows);
        break;
      case WeightFormat::kInt4Row:
        codes(rows * (cols / 2), false);
        float_scales(DType::kFP32, false, rows);
        break;
      case WeightFormat::kInt4Group:
      case WeightFormat::kInt4Zero: {
        const int64_t groups = rows * (cols / layout.group);
        const DType types[] = {DType::kFP16, DType::kBF16, DType::kFP32};
        codes(rows * (cols / 2), false);
        float_scales(types[int(layout.scale)], true, groups);
        if (layout.format != WeightFormat::kInt4Zero) break;
        make(zero, groups);
        for (int64_t i = 0; i < groups; ++i) zero->data()[i] %= 17;
        zero->patch(in, int(in.below(3)));
        break;
      }
      case WeightFormat::kFp8Block:
        codes(rows * cols, true);
        float_scales(DType::kFP32, false, (rows + 127) / 128 * ((cols + 127) / 128));
        break;
      case WeightFormat::kMxFp8:
        codes(rows * cols, true);
        byte_scales(rows * (cols / 32), 254);
        break;
      case WeightFormat::kMxFp4:
        codes(rows * (cols / 2), false);
        byte_scales(rows * (cols / 32), 254);
        break;
      case WeightFormat::kNvFp4:
        codes(rows * (cols / 2), false);
        byte_scales(rows * (cols / 16), 126);
        fill_floats(random, style(in), DType::kFP32, false,
                    reinterpret_cast<uint8_t*>(&weights.global), 1);
        break;
      default: {
        const kt::FormatTraits& f = layout.traits();
        const int64_t blocks = rows * (cols / f.block_cols);
        codes(blocks * f.file_bytes, false);
        for (int64_t i = 0; i < blocks; ++i)
          fill_floats(random, scales, DType::kFP16, true,
                      data->data() + i * f.file_bytes + ggml_d(layout.format),
                      f.scales.minimum ? 2 : 1);
        weights.blocks = true;
      }
    }
    data->patch(in, int(in.below(4)));
    if (scale) scale->patch(in, int(in.below(3)));
    weights.data = data->data();
    weights.scale = scale ? scale->data() : nullptr;
    weights.zero = zero ? zero->data() : nullptr;
  }
};

}  // namespace fuzz
