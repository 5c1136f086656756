// Streams of batches between a GPU and the layers (kernels/stream).
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../moe/layer.h"
#include "../stream/bus_split.h"
#include "../stream/engine.h"
#include "../stream/host_buffer.h"
#include "../stream/side.h"
#include "bind.h"

namespace {

// The address of a part of a buffer. Throws std::runtime_error in a forked child.
template <class T> uintptr_t address(const kt::HostBuffer& buffer, T* p) {
  if (!buffer.here())
    throw std::runtime_error(
        "this memory belongs to the parent process and does not exist in a child made by fork");
  return reinterpret_cast<uintptr_t>(p);
}

}  // namespace

void bind_stream(nb::module_& m) {
  using kt::HostBuffer, kt::StreamEngine, kt::StreamSide;

  // Buffers and sides are destroyed by their last user, possibly on a thread of this library. That
  // only unmaps memory.
  nb::class_<HostBuffer>(m, "HostBuffer",
                         "Zeroed memory that a GPU can be given access to. A caller that registers "
                         "it must keep the object until it is unregistered. Children of a fork do "
                         "not inherit the memory.")
      .def(nb::new_([](int64_t nbytes) { return std::make_shared<HostBuffer>(nbytes); }),
           "nbytes"_a, Unlocked())
      .def_prop_ro("address", [](const HostBuffer& b) { return address(b, b.data()); })
      .def_prop_ro("nbytes", &HostBuffer::bytes);

  nb::class_<StreamSide>(m, "StreamSide",
                         "One set of buffers (kernels/stream/side.h); dtype: 0 bf16, 1 fp16, 2 "
                         "float32.")
      .def(nb::new_([](int64_t capacity, int64_t hidden, int64_t top_k, int dtype, bool partial) {
             return std::make_shared<StreamSide>(capacity, hidden, top_k, kt::DType(dtype),
                                                 partial);
           }),
           "capacity"_a, "hidden"_a, "top_k"_a, "dtype"_a, "with_partial"_a = false, Unlocked())
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

  nb::class_<StreamEngine>(m, "StreamEngine", nb::is_weak_referenceable(),
                           "The ring and the thread that serves it (kernels/stream/engine.h).")
      .def(nb::new_([](int64_t entries, double watchdog_seconds, uint32_t first, bool traces) {
             return make_unlocked<StreamEngine>(entries, watchdog_seconds, first, traces);
           }),
           "entries"_a, "watchdog_seconds"_a, "first"_a = 0, "traces"_a = false, Unlocked())
      .def_prop_ro("buffer", [](const StreamEngine& e) { return e.buffer(); })
      .def_prop_ro("entries", &StreamEngine::entries)
      .def_prop_ro("ring_address",
                   [](const StreamEngine& e) { return address(*e.buffer(), e.ring()); })
      .def_prop_ro("head_address",
                   [](const StreamEngine& e) { return address(*e.buffer(), e.head()); })
      .def("add_slot", &StreamEngine::add_slot, "layer"_a, "where"_a, "side"_a, "chain"_a,
           "position"_a, "protected_k"_a, Unlocked())
      .def("drop_slot", &StreamEngine::drop_slot, "slot"_a, "forget"_a = false, Unlocked())
      .def("entries_of", &StreamEngine::entries_of, "slot"_a, Unlocked())
      // With the GIL, because it is called for each batch: an atomic load, unless there is an
      // error.
      .def("raise_error", &StreamEngine::raise_error)
      .def("pending", &StreamEngine::pending)
      .def("drain", &StreamEngine::drain, "timeout_s"_a, Unlocked())
      .def("stop", &StreamEngine::stop, Unlocked())
      .def("wake", &StreamEngine::wake)
      .def("take_trace", &StreamEngine::take_trace, Unlocked())
      .def("stats", &StreamEngine::stats);

  m.def(
      "split_over_bus",
      [](const std::vector<double>& on_cpu, double expert_on_bus, double batch_on_cpu,
         double streaming) {
        kt::BusSplit split = kt::split_over_bus(on_cpu, {expert_on_bus, batch_on_cpu, streaming});
        return std::pair(std::move(split.streamed), split.seconds);
      },
      "on_cpu"_a, nb::kw_only(), "expert_on_bus"_a, "batch_on_cpu"_a = 0.0, "streaming"_a = 0.0,
      "(experts to copy to the GPU, seconds) of a layer, from the seconds that the CPU takes for "
      "each expert and the other times of kernels/stream/bus_split.h.");
}
