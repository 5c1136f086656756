#include "pack.h"

#include "dense.h"
#include "ggml.h"
#include "quantised.h"

namespace kt {
namespace {

bool is_dense(const WeightSource& weights) { return !weights.scale && !weights.blocks; }

// Checks whether this format can be packed from this kind of source.
PackError check_kind(const MatrixLayout& layout, const MatrixSource& source) {
  const FormatTraits& format = layout.traits();
  const bool blocks = source.weights.blocks, dense = is_dense(source.weights);
  if (is_ggml(layout.format)) return blocks ? PackError::kNone : PackError::kNeedsBlocks;
  if (dense && format.from_dense)
    return layout.has_group() && layout.scale != ScaleType::kFP16 ? PackError::kNeedsFp16Scales
                                                                  : PackError::kNone;
  if (format.scales.kind == ScaleKind::kNone) return PackError::kNeedsDense;
  if (dense || blocks) return PackError::kNeedsQuantised;
  return format.scales.zero && !source.weights.zero ? PackError::kNeedsZeros : PackError::kNone;
}

}  // namespace

PackError check_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                     int64_t* bad_row) {
  *bad_row = source.row0 + tile * kTileRows;
  if (const PackError error = check_kind(layout, source); error != PackError::kNone) return error;
  if (source.weights.blocks) return check_ggml(layout, source, tile, bad_row);
  return is_dense(source.weights) ? check_dense(layout, source, tile, bad_row)
                                  : check_quantised(layout, source, tile, bad_row);
}

int64_t pack_scratch(const MatrixLayout& layout, const WeightSource& weights) {
  return is_dense(weights) ? dense_scratch(layout, weights.dtype) : 0;
}

PackError pack_tile(const MatrixLayout& layout, const MatrixSource& source, int64_t tile,
                    float* scratch, uint8_t* dst, int64_t* bad_row) {
  if (is_dense(source.weights)) {
    *bad_row = source.row0 + tile * kTileRows;
    const PackError error = check_kind(layout, source);
    return error != PackError::kNone ? error
                                     : pack_dense(layout, source, tile, scratch, dst, bad_row);
  }
  if (const PackError error = check_tile(layout, source, tile, bad_row); error != PackError::kNone)
    return error;
  if (source.weights.blocks)  // the check has brought them into the L2 cache
    pack_ggml(layout, source, tile, dst);
  else
    pack_quantised(layout, source, tile, dst);
  return PackError::kNone;
}

}  // namespace kt
