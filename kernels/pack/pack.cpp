#include "pack.h"

#include "dense.h"
#include "quantised.h"

namespace kt {
namespace {

bool is_dense(const MatrixSource& source) { return source.weights.scale == nullptr; }

// Whether this format can be packed from this kind of source.
PackError check_kind(const MatrixLayout& layout, const MatrixSource& source) {
  switch (layout.format) {
    case WeightFormat::kBF16:
    case WeightFormat::kInt8Row:
    case WeightFormat::kInt4Row:
      return is_dense(source) ? PackError::kNone : PackError::kNeedsDense;
    case WeightFormat::kInt4Group:
      return is_dense(source) && layout.scale != ScaleType::kFP16 ? PackError::kNeedsFp16Scales
                                                                  : PackError::kNone;
    case WeightFormat::kInt4Zero:
      if (!is_dense(source) && !source.weights.zero) return PackError::kNeedsZeros;
      [[fallthrough]];
    default: return is_dense(source) ? PackError::kNeedsQuantised : PackError::kNone;
  }
}

}  // namespace

PackError check_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row) {
  *bad_row = source.row0 + tile * kTileRows;
  if (const PackError error = check_kind(layout, source); error != PackError::kNone) return error;
  return is_dense(source) ? check_dense(layout, source, tile, bad_row)
                          : check_quantised(layout, source, tile, bad_row);
}

int64_t pack_scratch(const MatrixLayout& layout) { return dense_scratch(layout); }

void pack_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile, float* scratch,
               uint8_t* dst) {
  if (is_dense(source))
    pack_dense(layout, source, tile, scratch, dst);
  else
    pack_quantised(layout, source, tile, dst);
}

}  // namespace kt
