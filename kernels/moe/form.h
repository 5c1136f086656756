// How matrices are stored, and checks of the numbers that describe it. All checks throw
// std::invalid_argument naming the value and what is accepted.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "../pack/pack.h"

namespace kt {

// The matrices of an expert.
enum Matrix : int { kGate = 0, kUp = 1, kDown = 2 };
constexpr int kMatrices = 3;
constexpr const char* kMatrixNames[kMatrices] = {"gate", "up", "down"};
template <class T> using ByMatrix = std::array<T, kMatrices>;

constexpr int64_t kMaxTopK = 1 << 16;

// How one matrix of the experts is stored.
struct MatrixForm {
  WeightFormat format;
  int group;        // columns per scale of kInt4Group and kInt4Zero, else 0
  ScaleType scale;  // of the same formats

  MatrixLayout layout(int64_t rows, int64_t cols) const {
    return {format, rows, cols, group, scale};
  }
};

// Checks that value is from `least` to `most`.
void need_in_range(const std::string& name, int64_t value, int64_t least, int64_t most);

void need_dtype(const std::string& name, DType dtype);

// Checks that the form exists and that its blocks divide `columns` (1 to kMaxColumns). Messages
// begin with `where`.
void check_form(const MatrixForm& form, int64_t columns, const std::string& where);

// The layout of a matrix [rows, columns], both 1 to kMaxColumns, in a form that exists.
MatrixLayout checked_layout(const MatrixForm& form, int64_t rows, int64_t columns);

// Checks a source without reading it: its address and its type.
void check_source(const WeightSource& source, const std::string& name);

}  // namespace kt
