// What is wrong with weights that a job of several threads looks at.
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "form.h"

namespace kt {

struct Finding {
  PackError error = PackError::kNone;
  Matrix matrix = kGate;
  int64_t row = 0;

  // In the order of an expert's tiles (PoolPart::tile), in which each pool's threads look at them:
  // among what they stopped at is the first bad tile of all, whatever the pools and threads.
  std::tuple<bool, int64_t, Matrix, int64_t> place() const {
    return {matrix == kDown, row / kTileRows, matrix, row};
  }
};

std::string in_words(const Finding& finding);

// In words, the first of what each thread found first; "" where nobody found anything.
std::string first_problem(const std::vector<Finding>& findings);

}  // namespace kt
