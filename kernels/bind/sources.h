// Weights that come from Python as addresses.
#pragma once
#include <array>
#include <cstdint>
#include <tuple>

#include "../moe/layer.h"

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// (data, scale, zero, global) of kt::WeightSource. Without a scale, data are ggml's blocks.
using Source = std::tuple<uintptr_t, uintptr_t, uintptr_t, float>;

inline kt::WeightSource quantised(const Source& q) {
  const auto [data, scale, zero, global] = q;
  return {pointer<const void>(data), kt::DType::kFP32, pointer<const void>(scale),
          pointer<const void>(zero), global,           scale == 0};
}

// With a number of a dtype, dense weights.
inline kt::WeightSource source(const Source& q, int dtype) {
  if (dtype < 0) return quantised(q);
  return {pointer<const void>(std::get<0>(q)), kt::DType(dtype)};
}

// The same where the format tells: for all but ggml's, those without a scale are dense.
inline kt::WeightSource source(kt::WeightFormat format, const Source& q, int dtype) {
  return source(q, std::get<1>(q) || kt::is_ggml(format) ? -1 : dtype);
}

// A slot, and of gate, up and down the weights, the type of dense ones, and a bias or 0; of gate
// and up the order of the columns, or 0.
using SlotWeights = std::tuple<int64_t, kt::ByMatrix<Source>, kt::ByMatrix<int>,
                               kt::ByMatrix<uintptr_t>, std::array<uintptr_t, 2>>;

inline kt::SlotSource of_slot(const SlotWeights& given, bool scale_search) {
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
