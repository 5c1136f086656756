#include "finding.h"

namespace kt {

std::string in_words(const Finding& f) {
  const std::string row = is_of_a_row(f.error) ? " row " + std::to_string(f.row) : "";
  return kMatrixNames[f.matrix] + row + ": " + describe(f.error);
}

const Finding* first_of(const std::vector<Finding>& findings) {
  const Finding* first = nullptr;
  for (const Finding& f : findings)
    if (f.error != PackError::kNone && (!first || f.place() < first->place())) first = &f;
  return first;
}

}  // namespace kt
