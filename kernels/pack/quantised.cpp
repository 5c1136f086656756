#include "quantised.h"

#include <cmath>
#include <cstring>

#include "steps.h"

namespace kt {
namespace {

// The part's scales, or zero points, of the rows from one on.
struct Values {
  const uint8_t* first;
  int64_t size;           // bytes of a value
  int64_t stride, count;  // bytes from row to row; values per row
};

int64_t cols_per_scale(const MatrixLayout& layout, const MatrixSource& source) {
  switch (layout.format) {
    case WeightFormat::kInt4Group:
    case WeightFormat::kInt4Zero: return layout.group;
    case WeightFormat::kFp8Block: return kFp8BlockSize;
    case WeightFormat::kFp8Row: return source.cols;
    case WeightFormat::kNvFp4: return 16;
    default: return 32;
  }
}

Values values_of(const void* all, int64_t size, const MatrixLayout& layout,
                 const MatrixSource& source, int64_t row) {
  const int64_t cols = cols_per_scale(layout, source);
  const int64_t stride = ceil_div(source.cols, cols) * size;
  if (layout.format == WeightFormat::kFp8Block) row /= kFp8BlockSize;
  return {static_cast<const uint8_t*>(all) + row * stride + source.col0 / cols * size, size, stride,
          ceil_div(layout.cols, cols)};
}

Values scales_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row) {
  int64_t size = 1;  // ue8m0, e4m3
  if (layout.has_group()) size = layout.scale_bytes();
  if (layout.format == WeightFormat::kFp8Block || layout.format == WeightFormat::kFp8Row) size = 4;
  return values_of(source.weights.scale, size, layout, source, row);
}

Values zeros_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row) {
  return values_of(source.weights.zero, 1, layout, source, row);
}

bool has_e4m3(WeightFormat format) {
  return format == WeightFormat::kFp8Block || format == WeightFormat::kFp8Row ||
         format == WeightFormat::kMxFp8;
}

// The codes of the tile's rows. Pads are codes of zero; kInt4Zero has zero points of 0 there.
ByteRows codes_of(const MatrixLayout& layout, const MatrixSource& source, int64_t row,
                  int64_t rows) {
  const int64_t per_byte = has_e4m3(layout.format) ? 1 : 2, stride = source.cols / per_byte;
  const auto* data = static_cast<const uint8_t*>(source.weights.data);
  const uint8_t pad = layout.format == WeightFormat::kInt4Group ? 0x88 : 0;
  return {data + row * stride + source.col0 / per_byte, stride, layout.cols / per_byte, rows, pad};
}

// Whether every value of the first row is below `limit`, or `also` where that is not 0.
template <class T> bool all_below(const Values& v, T limit, T also = 0) {
  bool good = true;
  for (int64_t i = 0; i < v.count; ++i) {
    T x;
    std::memcpy(&x, v.first + i * int64_t(sizeof(T)), sizeof(T));
    good &= (x < limit) | (x == also);
  }
  return good;
}

// Finite and not negative, by their bits; -0 is a zero like the other.
bool good_floats(const Values& v, ScaleType type) {
  switch (type) {
    case ScaleType::kFP16: return all_below<uint16_t>(v, 0x7c00, 0x8000);
    case ScaleType::kBF16: return all_below<uint16_t>(v, 0x7f80, 0x8000);
    default: return all_below<uint32_t>(v, 0x7f800000, 0x80000000);
  }
}

PackError check_scales(const MatrixLayout& layout, const MatrixSource& source, int64_t row) {
  const Values v = scales_of(layout, source, row);
  switch (layout.format) {
    case WeightFormat::kMxFp8:
    case WeightFormat::kMxFp4:
      return all_below<uint8_t>(v, 255) ? PackError::kNone : PackError::kBadUe8m0Scale;
    case WeightFormat::kNvFp4:
      return all_below<uint8_t>(v, 0x7f) ? PackError::kNone : PackError::kBadE4m3Scale;
    default:
      return good_floats(v, layout.has_group() ? layout.scale : ScaleType::kFP32)
                 ? PackError::kNone
                 : PackError::kBadScale;
  }
}

bool has_nan_code(const uint8_t* codes, int64_t n) {
  bool found = false;
  for (int64_t k = 0; k < n; ++k) found |= (codes[k] & 0x7f) == 0x7f;
  return found;
}

PackError check_row(const MatrixLayout& layout, const MatrixSource& source, int64_t row) {
  if (const PackError e = check_scales(layout, source, row); e != PackError::kNone) return e;
  if (layout.format == WeightFormat::kInt4Zero &&
      !all_below<uint8_t>(zeros_of(layout, source, row), 17))
    return PackError::kBadZero;
  const ByteRows codes = codes_of(layout, source, row, 1);
  if (has_e4m3(layout.format) && has_nan_code(codes.first, codes.bytes)) return PackError::kNanCode;
  return PackError::kNone;
}

template <class T>
void write_values(const MatrixLayout& layout, const Values& v, int64_t rows, T pad,
                  int64_t per_block, int64_t offset, uint8_t* tile) {
  write_scales<T>(layout, {v.first, v.stride, v.count, rows, pad}, per_block, offset, tile);
}

void write_head(const MatrixLayout& layout, const void* values, int64_t bytes, uint8_t* tile) {
  std::memset(tile, 0, size_t(layout.head_bytes()));
  std::memcpy(tile, values, size_t(bytes));
}

// Scales, and zero points, of `rows` rows from row `first` on.
void write_all_scales(const MatrixLayout& layout, const MatrixSource& source, int64_t first,
                      int64_t rows, uint8_t* tile) {
  const Values v = scales_of(layout, source, first);
  switch (layout.format) {
    case WeightFormat::kInt4Zero: {
      const int64_t zeros = kTileRows * v.size;
      write_values<uint8_t>(layout, zeros_of(layout, source, first), rows, 0, 1, zeros, tile);
      const Values none{nullptr, 1, 0, v.count};
      write_values<uint8_t>(layout, none, 0, 0, 1, zeros + kTileRows, tile);
      [[fallthrough]];
    }
    case WeightFormat::kInt4Group:
      return v.size == 4 ? write_values<uint32_t>(layout, v, rows, 0, 1, 0, tile)
                         : write_values<uint16_t>(layout, v, rows, 0, 1, 0, tile);
    case WeightFormat::kMxFp8:
    case WeightFormat::kMxFp4: return write_values<uint8_t>(layout, v, rows, 127, 2, 0, tile);
    case WeightFormat::kNvFp4:
      write_head(layout, &source.weights.global, 4, tile);
      return write_values<uint8_t>(layout, v, rows, 0, 2, 0, tile);
    case WeightFormat::kFp8Row: return write_head(layout, v.first, rows * 4, tile);
    default: return write_head(layout, v.first, v.count * 4, tile);  // kFp8Block
  }
}

}  // namespace

PackError check_quantised(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                          int64_t* bad_row) {
  const float global = source.weights.global;
  if (layout.format == WeightFormat::kNvFp4 && !(std::isfinite(global) && global >= 0))
    return PackError::kBadGlobal;
  const int64_t first = source.row0 + tile * kTileRows;
  for (int64_t row = first; row < first + tile_rows(layout, tile); ++row) {
    *bad_row = row;
    if (const PackError e = check_row(layout, source, row); e != PackError::kNone) return e;
  }
  return PackError::kNone;
}

void pack_quantised(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                    uint8_t* dst) {
  const int64_t first = source.row0 + tile * kTileRows, rows = tile_rows(layout, tile);
  write_all_scales(layout, source, first, rows, dst);
  write_steps(layout, codes_of(layout, source, first, rows),
              has_e4m3(layout.format) ? LaneOrder::kPairs : LaneOrder::kNibbles, dst);
}

}  // namespace kt
