// Streams of batches between a GPU and the layers (kernels/stream), and launches of its kernels.
#include "stream.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../moe/layer.h"
#include "../stream/engine.h"
#include "../stream/host_buffer.h"
#include "../stream/side.h"
#include "../stream/split.h"
#include "../sys/cuda_driver.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Of what lies in a buffer. Throws std::runtime_error in a child of the process that made it.
template <class T> uintptr_t address(const kt::HostBuffer& buffer, T* p) {
  if (!buffer.here())
    throw std::runtime_error(
        "this memory belongs to the parent process and does not exist in a child made by fork");
  return reinterpret_cast<uintptr_t>(p);
}

// The value of one parameter, in its low bytes.
uint64_t parameter(char kind, PyObject* given, size_t i) {
  if (kind == 'p') {
    const unsigned long long value = PyLong_AsUnsignedLongLong(given);
    if (value == ~0ull && PyErr_Occurred()) throw nb::python_error();
    return value;
  }
  const long long value = PyLong_AsLongLong(given);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  if (value != int32_t(value))
    throw std::overflow_error("parameter " + std::to_string(i) + " is " + std::to_string(value) +
                              ", which is no int32");
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

void run(const kt::sys::KernelLaunch& kernel, int64_t grid, uint64_t stream, uint64_t* values,
         uint64_t wait_address) {
  // A launch waits where the queue is full, perhaps for a host function that needs the GIL.
  const nb::gil_scoped_release released;
  kernel.run(grid, stream, values, wait_address);
}

void launch(const kt::sys::KernelLaunch& kernel, int64_t grid, uint64_t stream, nb::args given) {
  const std::string& kinds = kernel.kinds();
  need_count(given.size(), kinds.size());
  uint64_t values[kt::sys::KernelLaunch::kMaxParameters];
  for (size_t i = 0; i < kinds.size(); ++i) values[i] = parameter(kinds[i], item(given, i), i);
  run(kernel, grid, stream, values, 0);
}

// A launch whose arguments are known but for some.
struct BoundLaunch {
  const kt::sys::KernelLaunch* kernel;
  int64_t grid;
  uint64_t wait_address;  // see KernelLaunch::run
  uint64_t values[kt::sys::KernelLaunch::kMaxParameters];
  std::vector<size_t> open;  // parameters that are given at each run
};

BoundLaunch bind(const kt::sys::KernelLaunch& kernel, int64_t grid, nb::args given,
                 uint64_t wait_address) {
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

using Ids = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

auto split_deferred(Ids ids, Weights weights, int64_t protected_k, int64_t num_experts) {
  const size_t tokens = ids.shape(0), top_k = ids.shape(1), routes = tokens * top_k;
  if (weights.shape(0) != tokens || weights.shape(1) != top_k)
    throw std::invalid_argument("ids and weights must both be [T, k]");
  if (num_experts < 1) throw std::invalid_argument("num_experts must be positive");
  const auto make = [&](int64_t* data) {
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
    return nb::ndarray<nb::numpy, int64_t>(data, {tokens, top_k}, owner);
  };
  auto* const immediate = new int64_t[routes + 1];
  const auto first = make(immediate);
  auto* const deferred = new int64_t[routes + 1];
  const auto second = make(deferred);
  std::copy_n(ids.data(), routes, immediate);
  kt::DeferredSplit(num_experts, int64_t(top_k))
      .run(weights.data(), int64_t(tokens), protected_k, immediate, deferred);
  return std::pair(first, second);
}

}  // namespace

void bind_stream(nb::module_& m) {
  using kt::HostBuffer, kt::StreamEngine, kt::StreamSide;

  nb::class_<HostBuffer>(m, "HostBuffer",
                         "Zeroed memory for a GPU to be given access to: whoever registers it "
                         "keeps the object until it is unregistered. Children of a fork do not "
                         "inherit the memory.")
      .def(nb::new_([](int64_t nbytes) { return std::make_shared<HostBuffer>(nbytes); }),
           "nbytes"_a)
      .def_prop_ro("address", [](const HostBuffer& b) { return address(b, b.data()); })
      .def_prop_ro("nbytes", &HostBuffer::bytes);

  nb::class_<StreamSide>(m, "StreamSide",
                         "One set of buffers (kernels/stream/side.h); dtype: 0 bf16, 1 fp16, 2 "
                         "float32.")
      .def(nb::new_([](int64_t capacity, int64_t hidden, int64_t top_k, int dtype, bool partial) {
             return std::make_shared<StreamSide>(capacity, hidden, top_k, kt::DType(dtype),
                                                 partial);
           }),
           "capacity"_a, "hidden"_a, "top_k"_a, "dtype"_a, "with_partial"_a = false)
      .def_prop_ro("buffer", [](const StreamSide& s) { return s.buffer(); })
      .def_prop_ro("capacity", &StreamSide::capacity)
      .def_prop_ro("tokens_address",
                   [](const StreamSide& s) { return address(*s.buffer(), s.tokens()); })
      .def_prop_ro("times_address",
                   [](const StreamSide& s) { return address(*s.buffer(), s.times()); })
      .def_prop_ro("done_address",
                   [](const StreamSide& s) { return address(*s.buffer(), s.done()); })
      .def_prop_ro("ready_address",
                   [](const StreamSide& s) { return address(*s.buffer(), s.ready()); })
      .def_prop_ro("x_address", [](const StreamSide& s) { return address(*s.buffer(), s.x()); })
      .def_prop_ro("ids_address", [](const StreamSide& s) { return address(*s.buffer(), s.ids()); })
      .def_prop_ro("weights_address",
                   [](const StreamSide& s) { return address(*s.buffer(), s.weights()); })
      .def_prop_ro("out_address",
                   [](const StreamSide& s) { return address(*s.buffer(), s.out()); });

  const nb::call_guard<nb::gil_scoped_release> unlocked;
  nb::class_<StreamEngine>(m, "StreamEngine", nb::is_weak_referenceable(),
                           "The ring and the thread that serves it (kernels/stream/engine.h).")
      .def(nb::init<int64_t, double, uint32_t, bool>(), "entries"_a, "watchdog_seconds"_a,
           "first"_a = 0, "traces"_a = false)
      .def_prop_ro("buffer", [](const StreamEngine& e) { return e.buffer(); })
      .def_prop_ro("entries", &StreamEngine::entries)
      .def_prop_ro("ring_address",
                   [](const StreamEngine& e) { return address(*e.buffer(), e.ring()); })
      .def_prop_ro("head_address",
                   [](const StreamEngine& e) { return address(*e.buffer(), e.head()); })
      .def("add_slot", &StreamEngine::add_slot, "layer"_a, "where"_a, "side"_a, "chain"_a,
           "position"_a, "protected_k"_a)
      .def("drop_slot", &StreamEngine::drop_slot, "slot"_a, "forget"_a = false)
      .def("entries_of", &StreamEngine::entries_of, "slot"_a)
      .def("raise_error", &StreamEngine::raise_error)
      .def("pending", &StreamEngine::pending)
      .def("drain", &StreamEngine::drain, "timeout_s"_a, unlocked)
      .def("stop", &StreamEngine::stop, unlocked)
      .def("wake", &StreamEngine::wake)
      .def("take_trace", &StreamEngine::take_trace)
      .def("stats", &StreamEngine::stats);

  nb::class_<kt::sys::CudaContext>(m, "CudaContext", "The CUDA context that is current now.")
      .def(nb::init<const std::string&>(), "library"_a = kt::sys::CudaContext::kDriver)
      .def("capturing", &kt::sys::CudaContext::capturing, "stream"_a)
      .def("wait", &kt::sys::CudaContext::wait, "stream"_a, "address"_a, "value"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Has a stream wait until the 32-bit word at the address is value.");

  nb::class_<kt::sys::KernelLaunch>(m, "KernelLaunch",
                                    "A CUfunction to be launched; kinds: one letter per parameter, "
                                    "p pointer, i int32.")
      .def(nb::init<uint64_t, int, int, std::string, const std::string&>(), "function"_a,
           "threads"_a, "shared_bytes"_a, "kinds"_a, "library"_a = kt::sys::CudaContext::kDriver)
      .def("run", launch, "grid"_a, "stream"_a, "args"_a)
      .def("bind", bind, nb::keep_alive<0, 1>(), "grid"_a, "args"_a, "wait_address"_a = 0,
           "A BoundLaunch: these arguments, but for those that are None. wait_address: of a 32-bit "
           "word that the stream waits for to be 1 before each launch; 0: it does not wait.");

  nb::class_<BoundLaunch>(m, "BoundLaunch", "A KernelLaunch with most of its arguments.")
      .def("run", launch_bound, "stream"_a, "args"_a, "args: what was None.");

  m.def("split_deferred", split_deferred, "ids"_a, "weights"_a, "protected_k"_a, "num_experts"_a,
        "(immediate, deferred) of int64 ids and float32 weights [T, k] (tests).");
}
