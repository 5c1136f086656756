// Weights that come from Python as addresses.
#pragma once
#include <array>
#include <cstdint>
#include <tuple>

#include "../moe/config.h"

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// (data, scale, zero, global) of kt::WeightSource. Without a scale, data are ggml's blocks.
using Source = std::tuple<uintptr_t, uintptr_t, uintptr_t, float>;

// The layout of a matrix [n, k]. Throws std::invalid_argument for numbers that stand for no form.
kt::MatrixLayout layout_of(int format, int group_size, int scale_type, int64_t n, int64_t k);

// With a number of a dtype, dense weights; with -1, quantised ones. Throws std::invalid_argument
// for other numbers.
kt::WeightSource source(const Source& q, int dtype);

// The same where the format tells: for all but ggml's, those without a scale are dense.
kt::WeightSource source(kt::WeightFormat format, const Source& q, int dtype);

// A slot, and of gate, up and down the weights, the type of dense ones, and a bias or 0; of gate
// and up the order of the columns, or 0.
using SlotWeights = std::tuple<int64_t, kt::ByMatrix<Source>, kt::ByMatrix<int>,
                               kt::ByMatrix<uintptr_t>, std::array<uintptr_t, 2>>;

kt::SlotSource of_slot(const SlotWeights& given, bool scale_search);
