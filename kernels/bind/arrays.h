// Checks of arrays.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
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

// The address range of an array, and its name.
struct Region {
  std::string name;
  uintptr_t begin, end;

  template <class Array>
  Region(std::string of, const Array& a)
      : name(std::move(of)),
        begin(reinterpret_cast<uintptr_t>(a.data())),
        end(begin + a.nbytes()) {}
  bool overlaps(const Region& other) const {
    return begin < end && other.begin < other.end && begin < other.end && other.begin < end;
  }
};

// Raises ValueError if an array that is written shares memory with another one.
inline void need_apart(const std::vector<Region>& written, const std::vector<Region>& read) {
  const auto check = [](const Region& one, const Region& other) {
    kt::need(!one.overlaps(other), one.name + " overlaps " + other.name + " in memory; " +
                                       one.name + " is written to and needs memory of its own");
  };
  for (size_t i = 0; i < written.size(); ++i) {
    for (const Region& other : read) check(written[i], other);
    for (size_t j = 0; j < i; ++j) check(written[i], written[j]);
  }
}
