// Checks of arrays.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "../sys/need.h"

template <class Array>
void need_shape(const std::string& name, const Array& a, const std::vector<size_t>& shape) {
  bool same = a.ndim() == shape.size();
  std::string given, needed;
  for (size_t i = 0; i < shape.size(); ++i) {
    same = same && a.shape(i) == shape[i];
    given += (i ? ", " : "") + std::to_string(a.shape(i));
    needed += (i ? ", " : "") + std::to_string(shape[i]);
  }
  kt::need(same, name + " is [" + given + "]; expected [" + needed + "]");
}
