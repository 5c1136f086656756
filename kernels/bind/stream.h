// What module.cpp takes from stream.cpp.
#pragma once
#include <nanobind/nanobind.h>

void bind_stream(nanobind::module_& m);
