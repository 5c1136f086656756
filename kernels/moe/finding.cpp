#include "finding.h"

#include <tuple>

namespace kt {

std::string first_problem(const std::vector<Finding>& findings) {
  const Finding* first = nullptr;
  for (const Finding& f : findings)
    if (f.error != PackError::kNone &&
        (!first || std::tie(f.matrix, f.row) < std::tie(first->matrix, first->row)))
      first = &f;
  if (!first) return "";
  const std::string row = is_of_a_row(first->error) ? " row " + std::to_string(first->row) : "";
  return kMatrixNames[first->matrix] + row + ": " + describe(first->error);
}

}  // namespace kt
