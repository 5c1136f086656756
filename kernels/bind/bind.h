// What the parts of the extension module share.
#pragma once
#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace nb::literals;

// Each adds a part to the module.
void bind_machine(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_products(nb::module_& m);
void bind_stream(nb::module_& m);
void bind_cuda(nb::module_& m);
