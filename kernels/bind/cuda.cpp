// Launches of GPU kernels through the CUDA driver.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "../sys/cuda_driver.h"
#include "../sys/cuda_work.h"
#include "bind.h"

namespace {

using kt::sys::BoundLaunch, kt::sys::Grid;

using GridGiven = std::variant<int64_t, std::array<int64_t, 3>>;

Grid grid_of(const GridGiven& given) {
  if (const int64_t* x = std::get_if<int64_t>(&given)) return {*x};
  const auto& [x, y, z] = std::get<1>(given);
  return {x, y, z};
}

// Used instead of Python's own error, which does not name the parameter.
[[noreturn]] void refuse(char kind, PyObject* given, size_t i) {
  PyErr_Clear();
  const std::string message =
      "parameter " + std::to_string(i) + " is " + nb::cast<std::string>(nb::repr(given)) +
      "; accepted: " +
      (kind == 'p' ? "an address, 0 to 2^64 - 1" : (kind == 'i' ? "an int32" : "an int64"));
  if (PyLong_Check(given)) throw nb::value_error(message.c_str());
  throw nb::type_error(message.c_str());
}

// The value of one parameter, in its low bytes.
uint64_t parameter(char kind, PyObject* given, size_t i) {
  if (kind == 'p') {
    const unsigned long long value = PyLong_AsUnsignedLongLong(given);
    if (value == ~0ull && PyErr_Occurred()) refuse(kind, given, i);
    return value;
  }
  const long long value = PyLong_AsLongLong(given);
  if ((kind == 'i' && value != int32_t(value)) || (value == -1 && PyErr_Occurred()))
    refuse(kind, given, i);
  return uint64_t(value);
}

PyObject* item(const nb::args& given, size_t i) {
  return PyTuple_GetItem(given.ptr(), Py_ssize_t(i));
}

void need_count(size_t given, size_t parameters) {
  if (given != parameters)
    throw std::invalid_argument(std::to_string(given) + " arguments for " +
                                std::to_string(parameters) + " parameters");
}

void run(const kt::sys::KernelLaunch& kernel, const Grid& grid, uint64_t stream, uint64_t* values,
         uint64_t wait_address) {
  // A launch waits if the queue is full, possibly for a host function that needs the GIL.
  const nb::gil_scoped_release released;
  kernel.run(grid, stream, values, wait_address);
}

void launch(const kt::sys::KernelLaunch& kernel, int64_t grid, uint64_t stream, nb::args given) {
  const std::string& kinds = kernel.kinds();
  need_count(given.size(), kinds.size());
  uint64_t values[kt::sys::KernelLaunch::kMaxParameters];
  for (size_t i = 0; i < kinds.size(); ++i) values[i] = parameter(kinds[i], item(given, i), i);
  run(kernel, {grid}, stream, values, 0);
}

BoundLaunch bind(const kt::sys::KernelLaunch& kernel, const GridGiven& blocks, nb::args given,
                 uint64_t wait_address) {
  const Grid grid = grid_of(blocks);
  kt::sys::KernelLaunch::check_grid(grid);
  kt::sys::CudaContext::check_address(wait_address, true);
  need_count(given.size(), kernel.kinds().size());
  BoundLaunch bound{&kernel, grid, wait_address, {}, {}};
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].is_none())
      bound.open.push_back(i);
    else
      bound.values[i] = parameter(kernel.kinds()[i], item(given, i), i);
  }
  return bound;
}

void launch_bound(const BoundLaunch& bound, uint64_t stream, nb::args given) {
  need_count(given.size(), bound.open.size());
  uint64_t values[kt::sys::KernelLaunch::kMaxParameters];
  std::copy(std::begin(bound.values), std::end(bound.values), values);
  for (size_t i = 0; i < given.size(); ++i) {
    const size_t at = bound.open[i];
    values[at] = parameter(bound.kernel->kinds()[at], item(given, i), at);
  }
  run(*bound.kernel, bound.grid, stream, values, bound.wait_address);
}

using Copies = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;

std::vector<kt::sys::Copy> copies_of(const Copies& given) {
  std::vector<kt::sys::Copy> copies;
  copies.reserve(given.size());
  for (const auto& [to, from, bytes] : given) copies.push_back({to, from, bytes});
  return copies;
}

void copy(const kt::sys::CudaContext& context, uint64_t stream, const Copies& given) {
  const std::vector<kt::sys::Copy> copies = copies_of(given);
  const nb::gil_scoped_release released;
  context.copy(stream, copies);
}

// The launches are owned, so that they live as long as the call.
using Uploads = std::vector<std::pair<Copies, std::vector<std::shared_ptr<BoundLaunch>>>>;

int64_t start(kt::sys::UploadQueue& queue, const Uploads& given) {
  std::vector<kt::sys::Upload> uploads;
  uploads.reserve(given.size());
  for (const auto& [copies, launches] : given) {
    uploads.push_back({copies_of(copies), {}});
    for (const auto& launch : launches) {
      if (!launch) throw nb::type_error("a launch is None; expected a BoundLaunch");
      uploads.back().launches.push_back(launch.get());
    }
  }
  const nb::gil_scoped_release released;
  return queue.start(uploads);
}

}  // namespace

void bind_cuda(nb::module_& m) {
  nb::class_<kt::sys::CudaContext>(m, "CudaContext", "The CUDA context that is current now.")
      .def(nb::init<const std::string&>(), "library"_a = kt::sys::CudaContext::kDriver, Unlocked())
      // With the GIL, because it is called for each batch: the driver answers from its own state.
      .def("capturing", &kt::sys::CudaContext::capturing, "stream"_a)
      .def("wait", &kt::sys::CudaContext::wait, "stream"_a, "address"_a, "value"_a, Unlocked(),
           "Makes a stream wait until the 32-bit word at the address is value. Streams are not "
           "checked; the address is only checked to be a multiple of 4 above 0.")
      .def("copy", copy, "stream"_a, "copies"_a,
           "Queues copies to the device: (its address, an address in host memory, bytes) each. "
           "Streams and addresses are not checked.");

  nb::class_<kt::sys::SyncedCopies>(m, "SyncedCopies",
                                    "Copies that are made again and again on a stream. to_device, "
                                    "to_host: (address to, address from, bytes) each, not checked.")
      .def(
          "__init__",
          [](kt::sys::SyncedCopies* self, const kt::sys::CudaContext& context, uint64_t stream,
             const Copies& to_device, const Copies& to_host) {
            new (self)
                kt::sys::SyncedCopies(context, stream, copies_of(to_device), copies_of(to_host));
          },
          "context"_a, "stream"_a, nb::kw_only(), "to_device"_a, "to_host"_a)
      .def("run", &kt::sys::SyncedCopies::run, Unlocked(),
           "Returns once the copies to the device, and then those to the host, are done.");

  nb::class_<kt::sys::UploadQueue>(m, "UploadQueue",
                                   "Uploads of experts on a stream (kernels/sys/cuda_work.h).")
      .def(nb::init<const kt::sys::CudaContext&, uint64_t>(), "context"_a, "stream"_a)
      .def("start", start, "uploads"_a,
           "Starts uploads: for each, its copies as of CudaContext.copy, and its BoundLaunches. "
           "Returns how many were started so far.")
      // With the GIL, because it is called several times in a millisecond: the driver answers from
      // its own state.
      .def("completed", &kt::sys::UploadQueue::completed,
           "How many uploads are complete: the first ones.")
      .def("wait", &kt::sys::UploadQueue::wait, Unlocked());

  nb::class_<kt::sys::KernelLaunch>(
      m, "KernelLaunch",
      "A CUfunction to be launched. kinds: one letter per parameter, "
      "p for a pointer, i for int32 or l for int64. The function is only checked "
      "for 0; streams and pointers are not checked.")
      .def(nb::init<uint64_t, int, int, std::string, const std::string&>(), "function"_a,
           "threads"_a, "shared_bytes"_a, "kinds"_a, "library"_a = kt::sys::CudaContext::kDriver,
           Unlocked())
      .def("run", launch, "grid"_a, "stream"_a, "args"_a)
      .def("bind", bind, nb::keep_alive<0, 1>(), "grid"_a, "args"_a, "wait_address"_a = 0,
           "A BoundLaunch with these arguments, except for those that are None. grid: blocks, or "
           "their numbers in three dimensions. wait_address: the "
           "address of a 32-bit word; each launch first waits until it is 1. 0: no wait.");

  nb::class_<BoundLaunch>(m, "BoundLaunch", "A KernelLaunch with most of its arguments.")
      .def("run", launch_bound, "stream"_a, "args"_a, "args: those that were None.");
}
