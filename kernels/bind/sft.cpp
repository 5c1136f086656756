// Layers in training.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../moe/layer.h"
#include "../sft/finite.h"
#include "../sft/layer.h"
#include "../sys/need.h"
#include "arrays.h"
#include "bind.h"
#include "ticket.h"

namespace {

// Arrays are never converted: results that are written to a converted copy would be lost.
template <class T, int n> using Array = nb::ndarray<T, nb::ndim<n>, nb::c_contig, nb::device::cpu>;
using BF16 = Array<const uint16_t, 2>;
using BF16Room = Array<uint16_t, 2>;
using Ids = Array<const int64_t, 2>;
using Weights = Array<const float, 2>;
using WeightsRoom = Array<float, 2>;
using Adapter = Array<const float, 3>;
using Gradient = Array<float, 3>;

// Names and shapes of the tensors.
struct Shapes {
  const kt::LayerConfig& c;
  size_t rank;

  size_t hidden() const { return size_t(c.hidden_size); }
  size_t experts() const { return size_t(c.num_experts); }
  size_t in(int m) const { return size_t(m == kt::kDown ? c.intermediate_size : c.hidden_size); }
  size_t out(int m) const { return size_t(m == kt::kDown ? c.hidden_size : c.intermediate_size); }
  std::vector<size_t> adapter(int m, bool of_a) const {
    if (of_a) return {experts(), rank, in(m)};
    return {experts(), out(m), rank};
  }
  std::vector<size_t> rows(size_t tokens) const { return {tokens, hidden()}; }
  std::vector<size_t> routes(size_t tokens) const { return {tokens, size_t(c.top_k)}; }
  static std::string name(int m, bool of_a) {
    return kt::kMatrixNames[m] + std::string(of_a ? "_a" : "_b");
  }
};

struct SftLayer {
  std::shared_ptr<kt::MoeLayer> base;  // keeps the team and the weights
  kt::TrainingLayer layer;

  SftLayer(std::shared_ptr<kt::MoeLayer> of, const kt::TrainingConfig& config)
      : base(std::move(of)), layer(base->shared_team(), base->state(), config) {}
  Shapes shapes() const { return {layer.layer_config(), size_t(layer.config().rank)}; }
};

std::shared_ptr<SftLayer> make_layer(std::shared_ptr<kt::MoeLayer> base, int64_t rank,
                                     float scaling, float dropout, int64_t max_cache_depth,
                                     bool recompute, bool skip_lora_grads, bool full_weight_grad) {
  return make_unlocked<SftLayer>(
      std::move(base), kt::TrainingConfig{rank, scaling, dropout, max_cache_depth, recompute,
                                          skip_lora_grads, full_weight_grad});
}

void update_lora(SftLayer& self, const Adapter& gate_a, const Adapter& gate_b, const Adapter& up_a,
                 const Adapter& up_b, const Adapter& down_a, const Adapter& down_b) {
  const Adapter* given[] = {&gate_a, &gate_b, &up_a, &up_b, &down_a, &down_b};
  kt::LoraSource source;
  for (int m = 0; m < kt::kMatrices; ++m)
    for (bool of_a : {true, false}) {
      const Adapter& one = *given[2 * m + !of_a];
      need_shape(Shapes::name(m, of_a), one, self.shapes().adapter(m, of_a));
      (of_a ? source.a : source.b)[size_t(m)] = one.data();
    }
  self.layer.update_lora(source);
}

kt::TrainingForwardArgs forward_args(const SftLayer& self, const BF16& x, const Ids& ids,
                                     const Weights& weights, const BF16Room& out, uint64_t seed,
                                     bool drop) {
  const Shapes shapes = self.shapes();
  const size_t tokens = x.shape(0);
  need_shape("x", x, shapes.rows(tokens));
  need_shape("ids", ids, shapes.routes(tokens));
  need_shape("weights", weights, shapes.routes(tokens));
  need_shape("out", out, shapes.rows(tokens));
  need_apart({{"out", out}}, {{"x", x}, {"ids", ids}, {"weights", weights}});
  return {x.data(), ids.data(), weights.data(), out.data(), int64_t(tokens), seed, drop};
}

void forward(SftLayer& self, const BF16& x, const Ids& ids, const Weights& weights,
             const BF16Room& out, bool save, uint64_t seed, std::optional<bool> drop) {
  self.layer.forward(forward_args(self, x, ids, weights, out, seed, drop.value_or(save)), save);
}

// Keeps the memory of an array alive, even if the caller drops the object.
template <class A> std::shared_ptr<const void> owner(const A& array) {
  return std::make_shared<const A>(array);
}

Ticket submit_forward(SftLayer& self, const BF16& x, const Ids& ids, const Weights& weights,
                      const BF16Room& out, bool save, uint64_t seed, std::optional<bool> drop) {
  const kt::TrainingForwardArgs args =
      forward_args(self, x, ids, weights, out, seed, drop.value_or(save));
  Ticket::Owners owners{owner(x), owner(ids), owner(weights), owner(out)};
  const nb::gil_scoped_release unlocked;
  std::shared_ptr<kt::sys::Job> job = self.layer.submit_forward(args, save);
  return {std::move(job), std::move(owners)};
}

using Gradients = std::optional<std::vector<std::optional<Gradient>>>;

// Checks the arrays that gradients are written to, and adds them to `written`.
kt::WeightGradients gradients(const SftLayer& self, const Gradients& given,
                              std::vector<Region>& written) {
  const kt::TrainingConfig& config = self.layer.config();
  const Shapes shapes = self.shapes();
  std::vector<const Gradient*> arrays;
  if (given)
    for (const auto& one : *given)
      if (one) arrays.push_back(&*one);
  const size_t adapters = config.skip_lora_grads ? 0 : 2 * kt::kMatrices;
  const size_t needed = adapters + (config.full_weight_grad ? kt::kMatrices : 0);
  kt::need(arrays.size() == needed, "grads has " + std::to_string(arrays.size()) +
                                        " arrays; expected " + std::to_string(needed));
  kt::WeightGradients result{};
  for (size_t i = 0; i < needed; ++i) {
    if (i < adapters) {
      const auto m = int(i / 2);
      const bool of_a = i % 2 == 0;
      const std::string name = "grads, " + Shapes::name(m, of_a);
      need_shape(name, *arrays[i], shapes.adapter(m, of_a));
      written.emplace_back(name, *arrays[i]);
      (of_a ? result.a : result.b)[size_t(m)] = arrays[i]->data();
      continue;
    }
    const auto m = int(i - adapters);
    const std::string name = std::string("grads, ") + kt::kMatrixNames[m];
    need_shape(name, *arrays[i], {shapes.experts(), shapes.out(m), shapes.in(m)});
    written.emplace_back(name, *arrays[i]);
    result.weight[size_t(m)] = arrays[i]->data();
  }
  return result;
}

bool backward(SftLayer& self, const BF16& grad_out, const BF16Room& grad_in,
              const WeightsRoom& grad_weights, const Gradients& grads) {
  const Shapes shapes = self.shapes();
  const size_t tokens = grad_out.shape(0);
  need_shape("grad_out", grad_out, shapes.rows(tokens));
  need_shape("grad_in", grad_in, shapes.rows(tokens));
  need_shape("grad_weights", grad_weights, shapes.routes(tokens));
  std::vector<Region> written{{"grad_in", grad_in}, {"grad_weights", grad_weights}};
  const kt::WeightGradients weights = gradients(self, grads, written);
  need_apart(written, {{"grad_out", grad_out}});
  return self.layer.backward({grad_out.data(), grad_in.data(), grad_weights.data(), weights},
                             int64_t(tokens));
}

bool all_finite(SftLayer& self, const nb::ndarray<nb::c_contig, nb::device::cpu>& values) {
  const bool bf16 = values.dtype() == nb::dtype<uint16_t>();
  kt::need(values.ndim() > 0, "values is a scalar; expected an array");
  kt::need(bf16 || values.dtype() == nb::dtype<float>(),
           "values has another dtype; expected float32, or uint16 for the bits of bfloat16");
  const nb::gil_scoped_release unlocked;
  return kt::all_finite(*self.base->shared_team(), {{values.data(), int64_t(values.size()), bf16}});
}

}  // namespace

void bind_sft(nb::module_& m) {
  nb::class_<SftLayer>(m, "SftLayer")
      .def(nb::new_(&make_layer), "layer"_a, nb::kw_only(), "rank"_a, "scaling"_a,
           "dropout"_a = 0.0f, "max_cache_depth"_a = 1, "recompute"_a = false,
           "skip_lora_grads"_a = false, "full_weight_grad"_a = false, Unlocked(),
           "Low-rank adapters on the experts of a MoeLayer: y = x W^T + scaling * drop(x) A^T B^T. "
           "All experts must be loaded. Columns of I are in the order in which the layer stores "
           "them. Raises RuntimeError if two threads call it at the same time.")
      .def("update_lora", update_lora, "gate_a"_a.noconvert(), "gate_b"_a.noconvert(),
           "up_a"_a.noconvert(), "up_b"_a.noconvert(), "down_a"_a.noconvert(),
           "down_b"_a.noconvert(), Unlocked(),
           "Packs adapters: float32, A [E, rank, in], B [E, out, rank], by slot. If a value is not "
           "finite in bfloat16, raises ValueError and leaves the adapters as they were.")
      .def("forward", forward, "x"_a.noconvert(), "ids"_a.noconvert(), "weights"_a.noconvert(),
           "out"_a.noconvert(), nb::kw_only(), "save"_a, "seed"_a, "drop"_a = nb::none(),
           Unlocked(),
           "x: bf16 bits, uint16 [T, H]; ids: int64 [T, k]; weights: float32 [T, k]; out as x. "
           "`save` keeps x, gate and up for backward. `drop` turns on dropout, which `seed` "
           "determines; None: if the pass is kept. Raises RuntimeError before update_lora, and if "
           "max_cache_depth passes are "
           "kept already; ValueError if `out` overlaps another array.")
      .def(
          "submit_forward", submit_forward, "x"_a.noconvert(), "ids"_a.noconvert(),
          "weights"_a.noconvert(), "out"_a.noconvert(), nb::kw_only(), "save"_a, "seed"_a,
          "drop"_a = nb::none(),
          "Queues a forward pass and returns a Ticket, which keeps the arrays alive. They must not "
          "be changed before the ticket is done.")
      .def(
          "backward", backward, "grad_out"_a.noconvert(), "grad_in"_a.noconvert(),
          "grad_weights"_a.noconvert(), "grads"_a.noconvert().none(), Unlocked(),
          "Computes the gradients of the newest forward pass that is kept, and drops that pass. "
          "grad_out, grad_in: bf16 bits, uint16 [T, H]; grad_weights: float32 [T, k]; grads: "
          "float32 "
          "arrays to be overwritten: gate_a, gate_b, up_a, up_b, down_a, down_b unless "
          "skip_lora_grads, then gate, up, down with full_weight_grad. Returns whether all "
          "gradients "
          "are finite. Raises RuntimeError if no pass is kept or the newest was lost in a fork; "
          "ValueError if T is not that of the pass, if grad_out has a value that is not finite, or "
          "if an output array overlaps another array. The pass is still kept then.")
      .def("all_finite", all_finite, "values"_a.noconvert(),
           "Whether all values of an array are finite: float32, or the bits of bf16 as uint16.")
      .def(
          "drop_newest", [](SftLayer& self) { self.layer.drop_newest(); }, Unlocked(),
          "Drops the newest forward pass that is kept. Raises RuntimeError if none is.")
      .def(
          "clear", [](SftLayer& self) { self.layer.clear(); }, Unlocked(),
          "Drops all forward passes that are kept, and calls free_spare.")
      .def_static(
          "free_spare", [] { return kt::SpareMemory::of_process()->clear(); }, Unlocked(),
          "Frees the memory that passes of all layers left for later ones. Returns its bytes.")
      .def_prop_ro("pending", [](const SftLayer& self) { return self.layer.pending(); })
      .def_prop_ro("pending_tokens",
                   [](const SftLayer& self) { return self.layer.pending_tokens(); });
}
