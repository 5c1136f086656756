// Checks of arguments.
#pragma once
#include <stdexcept>
#include <string>

namespace kt {

inline void need(bool good, const std::string& what) {
  if (!good) throw std::invalid_argument(what);
}

}  // namespace kt
