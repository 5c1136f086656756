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
  int64_t expert = 0;  // of those that are loaded at once
  Matrix matrix = kGate;
  int64_t row = 0;

  // In the order of an expert's tiles (PoolPart::tile), in which each pool's threads look at them:
  // among what they stopped at is the first bad tile of all, whatever the pools and threads.
  std::tuple<int64_t, bool, int64_t, Matrix, int64_t> place() const {
    return {expert, matrix == kDown, row / kTileRows, matrix, row};
  }
};

// The first of what each thread found first; null where nobody found anything.
const Finding* first_of(const std::vector<Finding>& findings);

std::string in_words(const Finding& finding);

}  // namespace kt
