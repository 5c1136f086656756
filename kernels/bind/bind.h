// Shared by the parts of the extension module.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

// For every function that takes a lock, waits, reads files or computes for more than a few
// microseconds. Holding the GIL would stop all other Python threads, and could deadlock with a
// thread that needs it.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// make_shared for objects that Python owns and whose destructors may take long, because they join
// threads or free large memory. The destructors run without the GIL. Only for types that C++ holds
// through Python's references (nanobind's shared_ptr of a type without enable_shared_from_this),
// which any thread drops with the GIL held.
template <class T, class... Arguments> std::shared_ptr<T> make_unlocked(Arguments&&... arguments) {
  return {new T(std::forward<Arguments>(arguments)...), [](T* object) {
            const nb::gil_scoped_release unlocked;
            delete object;
          }};
}

// Each of these adds a part to the module.
void bind_machine(nb::module_& m);
void bind_formats(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_sft(nb::module_& m);
void bind_stream(nb::module_& m);
void bind_cuda(nb::module_& m);
void bind_cache(nb::module_& m);
void bind_testing(nb::module_& m);
