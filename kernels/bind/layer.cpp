// Thread teams, the layers that they compute, and passes in progress.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../moe/layer.h"
#include "../moe/state.h"
#include "../sys/need.h"
#include "arrays.h"
#include "bind.h"
#include "sources.h"
#include "tables.h"
#include "ticket.h"

namespace {

std::shared_ptr<kt::sys::Team> make_team(const std::vector<int>& threads,
                                         const std::vector<int>& nodes,
                                         const std::vector<int>& reserves) {
  kt::need(threads.size() == nodes.size(), std::to_string(threads.size()) + " pools and " +
                                               std::to_string(nodes.size()) +
                                               " nodes; expected one node per pool");
  kt::need(reserves.empty() || reserves.size() == threads.size(),
           std::to_string(threads.size()) + " pools and reserves of " +
               std::to_string(reserves.size()) + "; expected one number per pool, or none");
  std::vector<kt::sys::PoolSpec> pools;
  for (size_t i = 0; i < threads.size(); ++i)
    pools.push_back({threads[i], nodes[i], reserves.empty() ? 0 : reserves[i]});
  return make_unlocked<kt::sys::Team>(std::move(pools));
}

std::shared_ptr<kt::MoeLayer> make_layer(
    std::shared_ptr<kt::sys::Team> team, int64_t num_experts, int64_t top_k, int64_t hidden_size,
    int64_t intermediate_size, const kt::ByMatrix<std::tuple<int, int, int>>& forms,
    const std::vector<bool>& cpu_slots, float swiglu_limit, float swiglu_alpha, int64_t max_tokens,
    const std::string& table, int kind, int activation, bool gated, bool weight_on_input,
    float situ_beta, float situ_linear_beta, const kt::ByMatrix<int64_t>& gemm_min_rows,
    int64_t row_block, int64_t task_bytes) {
  const auto form = [&](kt::Matrix m) {
    const auto [format, group, scale] = forms[m];
    return kt::MatrixForm{kt::WeightFormat(format), group, kt::ScaleType(scale)};
  };
  return make_unlocked<kt::MoeLayer>(
      std::move(team), kt::LayerConfig{num_experts,
                                       top_k,
                                       hidden_size,
                                       intermediate_size,
                                       {form(kt::kGate), form(kt::kUp), form(kt::kDown)},
                                       {swiglu_limit, swiglu_alpha, kt::ActFunction(activation),
                                        gated, situ_beta, situ_linear_beta},
                                       std::vector<uint8_t>(cpu_slots.begin(), cpu_slots.end()),
                                       max_tokens,
                                       find_table(table),
                                       kt::KernelKind(kind),
                                       {gemm_min_rows, row_block, task_bytes},
                                       weight_on_input});
}

// Arrays are not converted: a converted copy of an array that is written to would be lost.
using Tiles = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using TileRoom = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;
using WeightRoom = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bias = std::optional<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;

kt::MatrixLayout layout_of(const kt::MoeLayer& layer, int matrix) {
  kt::need_matrix(layer.config(), matrix);
  return layer.config().layout(kt::Matrix(matrix));
}

void need_size(const std::string& name, size_t given, int64_t needed) {
  kt::need(int64_t(given) == needed,
           name + " has " + std::to_string(given) + " values; expected " + std::to_string(needed));
}

void load_packed(kt::MoeLayer& layer, int64_t slot, const std::optional<Tiles>& gate,
                 const Tiles& up, const Tiles& down, const Bias& gate_bias, const Bias& up_bias,
                 const Bias& down_bias) {
  const kt::ByMatrix<const Tiles*> tiles{gate ? &*gate : nullptr, &up, &down};
  const kt::ByMatrix<const Bias*> biases{&gate_bias, &up_bias, &down_bias};
  kt::ByMatrix<const uint8_t*> data{};
  kt::ByMatrix<const float*> bias{};
  for (int m = 0; m < kt::kMatrices; ++m) {
    const kt::MatrixLayout layout = layer.config().layout(kt::Matrix(m));
    const std::string name = kt::kMatrixNames[m];
    if (tiles[m]) {
      need_size(name, tiles[m]->size(), layout.bytes());
      data[m] = tiles[m]->data();
    }
    if (!*biases[m]) continue;
    need_size(name + "_bias", (*biases[m])->size(), layout.rows);
    bias[m] = (*biases[m])->data();
  }
  layer.load_packed(slot, data, bias);
}

void save_packed(const kt::MoeLayer& layer, int64_t slot, int matrix, const TileRoom& dst) {
  need_size("dst", dst.size(), layout_of(layer, matrix).bytes());
  layer.save_packed(slot, matrix, dst.data());
}

void unpack(const kt::MoeLayer& layer, int64_t slot, int matrix, const WeightRoom& dst) {
  const kt::MatrixLayout layout = layout_of(layer, matrix);
  kt::need(int64_t(dst.shape(0)) == layout.rows && int64_t(dst.shape(1)) == layout.cols,
           "dst is [" + std::to_string(dst.shape(0)) + ", " + std::to_string(dst.shape(1)) +
               "]; expected [" + std::to_string(layout.rows) + ", " + std::to_string(layout.cols) +
               "]");
  layer.unpack(slot, matrix, dst.data());
}

void biases(const kt::MoeLayer& layer, int matrix, const WeightRoom& dst) {
  kt::need_matrix(layer.config(), matrix);
  const kt::BiasTable& table = layer.state()->bias[size_t(matrix)];
  const int64_t held = layer.state()->held;
  need_shape("dst", dst, {size_t(held), size_t(table.width)});
  for (int64_t position = 0; position < held; ++position)
    std::copy_n(table.row(position), table.width, dst.data() + position * table.width);
}

// Where the packed weights of the experts lie, pool by pool.
nb::list packed_parts(const kt::MoeLayer& layer) {
  nb::list parts;
  for (const kt::PoolPart& part : layer.state()->pools) {
    if (!part.size) continue;
    nb::dict one;
    one["address"] = reinterpret_cast<uintptr_t>(part.memory.data());
    one["bytes"] = int64_t(part.memory.size());
    one["expert_bytes"] = part.expert_bytes();
    one["begin"] = part.begin;
    one["size"] = part.size;
    nb::list matrices;
    for (kt::Matrix m : {kt::kGate, kt::kUp, kt::kDown})
      matrices.append(nb::make_tuple(part.begin_of(m), part.stride_of(m)));
    one["matrices"] = nb::tuple(matrices);
    parts.append(one);
  }
  return parts;
}

}  // namespace

void bind_layer(nb::module_& m) {
  m.def(
      "packed_shape",
      [](int format, int group_size, int scale_type, int64_t n, int64_t k) {
        const auto layout = layout_of(format, group_size, scale_type, n, k);
        return std::pair(layout.tiles(), layout.tile_bytes());
      },
      "format"_a, "group_size"_a, "scale_type"_a, "n"_a, "k"_a,
      "(tiles, bytes of a tile) of a packed matrix [n, k].");
  nb::class_<kt::sys::Team>(m, "Team", nb::is_weak_referenceable())
      .def(nb::new_(&make_team), "threads"_a, "nodes"_a, "reserves"_a = std::vector<int>(),
           "Per pool: threads, NUMA node (-1: any), and how many of the threads sit out passes "
           "that memory bandwidth limits.")
      .def_prop_ro("pools", [](const kt::sys::Team& t) { return t.pools(); })
      .def_prop_ro("threads", [](const kt::sys::Team& t) { return t.threads(); });

  nb::class_<Ticket>(m, "Ticket")
      .def(
          "wait", [](const Ticket& t) { t.job->wait(); }, Unlocked())
      .def_prop_ro("done", [](const Ticket& t) { return t.job->done(); });

  nb::class_<kt::MoeLayer>(m, "MoeLayer")
      .def(nb::new_(&make_layer), "team"_a, nb::kw_only(), "num_experts"_a, "top_k"_a,
           "hidden_size"_a, "intermediate_size"_a, "forms"_a, "cpu_slots"_a, "swiglu_limit"_a,
           "swiglu_alpha"_a, "max_tokens"_a, "table"_a, "kind"_a, "activation"_a = 0,
           "gated"_a = true, "weight_on_input"_a = false, "situ_beta"_a = 1.0f,
           "situ_linear_beta"_a = 0.0f, "gemm_min_rows"_a = kt::ByMatrix<int64_t>{},
           "row_block"_a = 0, "task_bytes"_a = 0, Unlocked(),
           "activation: the number of a kt::ActFunction. gated: whether experts have a gate. If "
           "not, all arguments for gate are 0 or None. weight_on_input: router weights multiply x.")
      .def(
          "load",
          [](kt::MoeLayer& layer, int64_t slot, const Source& gate, const Source& up,
             const Source& down, uintptr_t gate_bias, uintptr_t up_bias, uintptr_t down_bias,
             const kt::ByMatrix<int>& dtypes, const std::array<uintptr_t, 2>& orders,
             bool scale_search) {
            layer.load(
                {of_slot({slot, {gate, up, down}, dtypes, {gate_bias, up_bias, down_bias}, orders},
                         scale_search)});
          },
          "slot"_a, "gate"_a, "up"_a, "down"_a, "gate_bias_ptr"_a = 0, "up_bias_ptr"_a = 0,
          "down_bias_ptr"_a = 0, "dtypes"_a = kt::ByMatrix<int>{-1, -1, -1},
          "orders"_a = std::array<uintptr_t, 2>{}, "scale_search"_a = false, Unlocked(),
          "Weights as (data, scale, zero, global) of kernels/pack/pack.h, WeightSource. dtypes: "
          "numbers of the types of dense weights, -1 for quantised ones. orders: for gate and up, "
          "the address of an int32 permutation, or 0; column j of the source is column order[j] of "
          "the matrix. Addresses are only checked for 0.")
      .def(
          "load_many",
          [](kt::MoeLayer& layer, const std::vector<SlotWeights>& experts, bool scale_search) {
            std::vector<kt::SlotSource> sources;
            for (const SlotWeights& e : experts) sources.push_back(of_slot(e, scale_search));
            layer.load(sources);
          },
          "experts"_a, "scale_search"_a = false, Unlocked(),
          "`load` for experts given as (slot, (gate, up, down), dtypes, bias addresses, orders).")
      .def("load_packed", load_packed, "slot"_a, "gate"_a.noconvert().none(), "up"_a.noconvert(),
           "down"_a.noconvert(), "gate_bias"_a.noconvert() = nb::none(),
           "up_bias"_a.noconvert() = nb::none(), "down_bias"_a.noconvert() = nb::none(), Unlocked(),
           "Loads packed tiles of whole matrices, uint8 arrays of as many values as packed_shape() "
           "of their form, at any address; biases are float32 [I], [I], [H]. Raises ValueError for "
           "codes or scales that packing does not make; the slot must then be loaded again.")
      .def("save_packed", save_packed, "slot"_a, "matrix"_a, "dst"_a.noconvert(), Unlocked(),
           "Writes the packed tiles of a whole matrix (0 gate, 1 up, 2 down) to a uint8 array of "
           "as many values as packed_shape() of its form.")
      .def(
          "submit",
          [](kt::MoeLayer& layer, uintptr_t x, int dtype, int64_t tokens, uintptr_t ids,
             uintptr_t weights, uintptr_t out, uintptr_t add, uintptr_t partial) {
            return Ticket{layer.submit({pointer<const void>(x), kt::DType(dtype), tokens,
                                        pointer<const int64_t>(ids), pointer<const float>(weights),
                                        pointer<void>(out), pointer<const float>(add),
                                        pointer<float>(partial)})};
          },
          "x_ptr"_a, "dtype"_a, "tokens"_a, "ids_ptr"_a, "weights_ptr"_a, "out_ptr"_a,
          "add_ptr"_a = 0, "partial_ptr"_a = 0, Unlocked(),
          "Queues a forward pass (kernels/moe/config.h, ForwardArgs). The memory behind the "
          "addresses must stay valid until it is done. Addresses are only checked for 0.")
      .def(
          "set_cpu_slots",
          [](kt::MoeLayer& layer, const std::vector<bool>& cpu_slots) {
            layer.set_on_cpu({cpu_slots.begin(), cpu_slots.end()});
          },
          "cpu_slots"_a, Unlocked(),
          "Sets which slots later passes compute, [num_experts]. Waits for the passes submitted "
          "before, which compute the old ones. Raises ValueError for a slot that is not loaded.")
      .def("unpack", unpack, "slot"_a, "matrix"_a, "dst"_a.noconvert(), Unlocked(),
           "Writes the dequantised weights of a matrix (0 gate, 1 up: [I, H], 2 down: [H, I]) to a "
           "float32 array.")
      .def_prop_ro("packed_bytes", &kt::MoeLayer::packed_bytes)
      .def("packed_parts", packed_parts,
           "Where the packed weights lie, for each pool that holds some: the address and bytes of "
           "all experts, in the order of `positions`; bytes of an expert; the part of I, as begin "
           "and size; and for gate, up and down the bytes from the expert's begin to the first "
           "tile, and from tile to tile. The memory stays where it is while the layer exists.")
      .def_prop_ro(
          "positions", [](const kt::MoeLayer& layer) { return layer.state()->position; },
          "For each slot, its place among the experts in `packed_parts`; -1 if it is not held.")
      .def_prop_ro(
          "has_column_orders",
          [](const kt::MoeLayer& layer) { return layer.state()->order.any.load(); },
          "Whether the columns of gate or up of some expert are stored in another order.")
      .def_prop_ro(
          "has_biases",
          [](const kt::MoeLayer& layer) {
            const auto& bias = layer.state()->bias;
            return std::any_of(bias.begin(), bias.end(),
                               [](const auto& b) { return b.any.load(); });
          },
          "Whether some expert has a bias.")
      .def("biases", biases, "matrix"_a, "dst"_a.noconvert(), Unlocked(),
           "Copies the biases of a matrix (0 gate, 1 up, 2 down) to float32 [experts held, rows], "
           "in the order of `positions`; zeros for experts without one.")
      .def("stats",
           [](const kt::MoeLayer& layer) {
             const kt::LayerStats& s = layer.state()->stats;
             return std::map<std::string, int64_t>{
                 {"forwards", s.forwards},         {"tokens", s.tokens},
                 {"expert_calls", s.expert_calls}, {"experts_touched", s.experts_touched},
                 {"vector_calls", s.vector_calls}, {"tile_calls", s.tile_calls},
                 {"stolen_tasks", s.stolen_tasks}};
           })
      .def(
          "set_timing", [](kt::MoeLayer& layer, bool on) { layer.state()->timings.set(on); },
          "on"_a,
          "Sets the times of timings() to zero. While on, passes submitted later add to them.")
      .def(
          "timings",
          [](kt::MoeLayer& layer) {
            std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> result;
            for (int p = 0; p < kt::kPhaseCount; ++p)
              for (const kt::ThreadTimes& t : layer.state()->timings.threads())
                result[kt::kPhaseNames[p]].emplace_back(t.work[p], t.wait[p]);
            return result;
          },
          "Per phase: the nanoseconds that each thread worked, and waited for other threads.");
}
