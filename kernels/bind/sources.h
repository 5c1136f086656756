// Weights that Python passes as addresses.
#pragma once
#include <array>
#include <cstdint>
#include <tuple>

#include "../moe/config.h"

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// (data, scale, zero, global) of kt::WeightSource. Without a scale, data are ggml's blocks.
using Source = std::tuple<uintptr_t, uintptr_t, uintptr_t, float>;

// The layout of a matrix [n, k]. Throws std::invalid_argument if the numbers are not a form.
kt::MatrixLayout layout_of(int format, int group_size, int scale_type, int64_t n, int64_t k);

// dtype: the number of a dtype for dense weights, -1 for quantised ones. Throws
// std::invalid_argument for other numbers.
kt::WeightSource source(const Source& q, int dtype);

// As above, if the format is known: without a scale, weights are dense, except in ggml's formats.
kt::WeightSource source(kt::WeightFormat format, const Source& q, int dtype);

// A slot; for gate, up and down the weights, the type of dense weights, and a bias or 0; for gate
// and up the order of the columns, or 0.
using SlotWeights = std::tuple<int64_t, kt::ByMatrix<Source>, kt::ByMatrix<int>,
                               kt::ByMatrix<uintptr_t>, std::array<uintptr_t, 2>>;

kt::SlotSource of_slot(const SlotWeights& given, bool scale_search);
