#include "sources.h"

kt::MatrixLayout layout_of(int format, int group_size, int scale_type, int64_t n, int64_t k) {
  return kt::checked_layout({kt::WeightFormat(format), group_size, kt::ScaleType(scale_type)}, n,
                            k);
}

kt::WeightSource source(const Source& q, int dtype) {
  kt::need_in_range("dtype", dtype, -1, int(kt::DType::kFP32));
  const auto [data, scale, zero, global] = q;
  kt::WeightSource made{pointer<const void>(data), kt::DType::kFP32};
  if (dtype >= 0) {
    made.dtype = kt::DType(dtype);
  } else {
    made.scale = pointer<const void>(scale);
    made.zero = pointer<const void>(zero);
    made.global = global;
    made.blocks = scale == 0;
  }
  return made;
}

kt::WeightSource source(kt::WeightFormat format, const Source& q, int dtype) {
  const bool quantised = std::get<1>(q) != 0 || kt::is_ggml(format);
  if (quantised) kt::need_in_range("dtype", dtype, -1, int(kt::DType::kFP32));  // otherwise unused
  return source(q, quantised ? -1 : dtype);
}

kt::SlotSource of_slot(const SlotWeights& given, bool scale_search) {
  const auto& [slot, weights, dtypes, biases, orders] = given;
  kt::SlotSource made{slot, {}};
  for (int m = 0; m < kt::kMatrices; ++m) {
    made.source.weights[m] = source(weights[m], dtypes[m]);
    made.source.weights[m].search = scale_search;
    made.source.bias[m] = pointer<const float>(biases[m]);
  }
  made.source.order = {pointer<const int32_t>(orders[kt::kGate]),
                       pointer<const int32_t>(orders[kt::kUp])};
  return made;
}
