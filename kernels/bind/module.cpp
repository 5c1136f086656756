// The Python extension. Private API: src/kt_kernel checks what users pass before it comes here;
// tensors cross as addresses, so that a call costs no conversions.
#include <nanobind/nanobind.h>
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
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "../moe/layer.h"
#include "../moe/product.h"
#include "../moe/product_bench.h"
#include "../ref/moe_reference.h"
#include "../sys/bandwidth.h"
#include "../sys/cpu_features.h"
#include "../sys/topology.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::map<std::string, bool> feature_flags() {
  const uint32_t have = kt::sys::cpu_features();
  const std::pair<const char*, uint32_t> names[] = {
      {"avx2", kt::sys::kAvx2},
      {"avx512", kt::sys::kAvx512},
      {"avx512_vnni", kt::sys::kAvx512Vnni},
      {"avx512_vbmi", kt::sys::kAvx512Vbmi},
      {"avx512_bf16", kt::sys::kAvx512Bf16},
      {"amx_tile", kt::sys::kAmxTile},
      {"amx_int8", kt::sys::kAmxInt8},
      {"amx_bf16", kt::sys::kAmxBf16},
      {"avx_vnni", kt::sys::kAvxVnni},
  };
  std::map<std::string, bool> flags;
  for (const auto& [name, bit] : names) flags[name] = (have & bit) != 0;
  return flags;
}

std::vector<std::string> usable_tables() {
  std::vector<std::string> names;
  for (auto t = kt::kKernelTables; *t; ++t)
    if (((*t)->features & ~kt::sys::cpu_features()) == 0) names.emplace_back((*t)->name);
  return names;
}

const kt::KernelTable* find_table(const std::string& name) {
  for (auto t = kt::kKernelTables; *t; ++t)
    if (name == (*t)->name && ((*t)->features & ~kt::sys::cpu_features()) == 0) return *t;
  throw std::invalid_argument("kernel table \"" + name + "\" cannot run on this CPU");
}

std::shared_ptr<kt::sys::Team> make_team(const std::vector<int>& threads,
                                         const std::vector<int>& nodes) {
  if (threads.size() != nodes.size()) throw std::invalid_argument("one node per pool is needed");
  std::vector<kt::sys::PoolSpec> pools;
  for (size_t i = 0; i < threads.size(); ++i) pools.push_back({threads[i], nodes[i]});
  return std::make_shared<kt::sys::Team>(std::move(pools));
}

std::shared_ptr<kt::MoeLayer> make_layer(
    std::shared_ptr<kt::sys::Team> team, int64_t num_experts, int64_t top_k, int64_t hidden_size,
    int64_t intermediate_size, const kt::ByMatrix<std::tuple<int, int, int>>& forms,
    const std::vector<bool>& cpu_slots, float swiglu_limit, float swiglu_alpha, int64_t max_tokens,
    const std::string& table, int kind, const kt::ByMatrix<int64_t>& gemm_min_rows,
    int64_t row_block, int64_t task_bytes) {
  const auto form = [&](kt::Matrix m) {
    const auto [format, group, scale] = forms[m];
    return kt::MatrixForm{kt::WeightFormat(format), group, kt::ScaleType(scale)};
  };
  return std::make_shared<kt::MoeLayer>(
      std::move(team), kt::LayerConfig{num_experts,
                                       top_k,
                                       hidden_size,
                                       intermediate_size,
                                       {form(kt::kGate), form(kt::kUp), form(kt::kDown)},
                                       {swiglu_limit, swiglu_alpha},
                                       std::vector<uint8_t>(cpu_slots.begin(), cpu_slots.end()),
                                       max_tokens,
                                       find_table(table),
                                       kt::KernelKind(kind),
                                       {gemm_min_rows, row_block, task_bytes}});
}

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// A queued forward pass.
struct Ticket {
  std::shared_ptr<kt::sys::Job> job;
};

using Doubles = nb::ndarray<const double, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;

const double* data_or_null(const std::optional<Doubles>& a) { return a ? a->data() : nullptr; }

auto reference_forward(Doubles x, Longs ids, Doubles weights, Doubles gate, Doubles up,
                       Doubles down, int activation_format, const std::vector<bool>& skip,
                       std::optional<Doubles> gate_bias, std::optional<Doubles> up_bias,
                       std::optional<Doubles> down_bias, double swiglu_limit, double swiglu_alpha) {
  kt::MoeReference r;
  r.tokens = int64_t(x.shape(0));
  r.hidden_size = int64_t(x.shape(1));
  r.top_k = int64_t(ids.shape(1));
  r.num_experts = int64_t(gate.shape(0));
  r.intermediate_size = int64_t(gate.shape(1));
  r.x = x.data();
  r.ids = ids.data();
  r.weights = weights.data();
  r.gate = gate.data();
  r.up = up.data();
  r.down = down.data();
  r.gate_bias = data_or_null(gate_bias);
  r.up_bias = data_or_null(up_bias);
  r.down_bias = data_or_null(down_bias);
  r.activation = kt::ActivationFormat(activation_format);
  const auto skipped = std::make_unique<bool[]>(skip.size());
  std::copy(skip.begin(), skip.end(), skipped.get());
  r.skip = skipped.get();
  r.swiglu_limit = swiglu_limit;
  r.swiglu_alpha = swiglu_alpha;
  auto* y = new double[size_t(std::max<int64_t>(1, r.tokens * r.hidden_size))];
  nb::capsule owner(y, [](void* p) noexcept { delete[] static_cast<double*>(p); });
  kt::moe_reference(r, y);
  return nb::ndarray<nb::numpy, double>(y, {size_t(r.tokens), size_t(r.hidden_size)}, owner);
}

using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

auto run_product(const std::string& table, bool gemm, const kt::MatrixLayout& layout,
                 const kt::WeightSource& w, Floats x) {
  const auto rows = x.shape(0);
  const auto columns = size_t(layout.tiles() * kt::kTileRows);
  auto* out = new float[std::max<size_t>(1, rows * columns)];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  kt::single_product(*find_table(table), gemm, layout, w, x.data(), int64_t(rows), out);
  return nb::ndarray<nb::numpy, float>(out, {rows, columns}, owner);
}

auto all_kernels() {
  constexpr const char* kOperands[] = {"float32", "bf16", "int8 rows", "int16 groups"};  // ActKind
  std::vector<std::tuple<std::string, int, std::string, std::string>> found;
  for (const auto* table = kt::kKernelTables; *table; ++table)
    for (int format = 0; format < kt::kFormatCount; ++format) {
      const auto& kernels = (*table)->format[format];
      found.emplace_back((*table)->name, format, kOperands[int(kernels.gemv.act)],
                         kOperands[int(kernels.gemm.act)]);
    }
  return found;
}

auto product(const std::string& table, bool gemm, int format, int group_size, Floats w, Floats x) {
  if (w.shape(1) != x.shape(1)) throw std::invalid_argument("w and x need the same columns");
  const kt::MatrixLayout layout{kt::WeightFormat(format), int64_t(w.shape(0)), int64_t(w.shape(1)),
                                group_size};
  return run_product(table, gemm, layout, {w.data(), kt::DType::kFP32}, x);
}

// (data, scale, zero, global) of kt::WeightSource. Without a scale, data are ggml's blocks.
using Source = std::tuple<uintptr_t, uintptr_t, uintptr_t, float>;

kt::WeightSource quantised(const Source& q) {
  const auto [data, scale, zero, global] = q;
  return {pointer<const void>(data), kt::DType::kFP32, pointer<const void>(scale),
          pointer<const void>(zero), global,           scale == 0};
}

// With a number of a dtype, dense weights.
kt::WeightSource source(const Source& q, int dtype) {
  if (dtype < 0) return quantised(q);
  return {pointer<const void>(std::get<0>(q)), kt::DType(dtype)};
}

// The same where the format tells: for all but ggml's, those without a scale are dense.
kt::WeightSource source(kt::WeightFormat format, const Source& q, int dtype) {
  return source(q, std::get<1>(q) || kt::is_ggml(format) ? -1 : dtype);
}

auto product_quantised(const std::string& table, bool gemm, int format, int group_size,
                       int scale_type, int64_t n, const Source& w, Floats x) {
  const kt::MatrixLayout layout{kt::WeightFormat(format), n, int64_t(x.shape(1)), group_size,
                                kt::ScaleType(scale_type)};
  return run_product(table, gemm, layout, quantised(w), x);
}

auto pack(int format, int group_size, int scale_type, int64_t n, int64_t k, const Source& w,
          int dtype, bool scale_search) {
  const kt::MatrixLayout layout{kt::WeightFormat(format), n, k, group_size,
                                kt::ScaleType(scale_type)};
  kt::MatrixSource whole{source(layout.format, w, dtype), k, 0, 0};
  whole.weights.search = scale_search;
  auto* tiles = static_cast<uint8_t*>(std::aligned_alloc(64, size_t(layout.bytes())));
  nb::capsule owner(tiles, [](void* p) noexcept { std::free(p); });
  std::vector<float> scratch(size_t(kt::pack_scratch(layout, whole.weights)));
  for (int64_t tile = 0, row = 0; tile < layout.tiles(); ++tile)
    if (const auto error = kt::pack_tile(layout, whole, tile, scratch.data(),
                                         tiles + tile * layout.tile_bytes(), &row);
        error != kt::PackError::kNone)
      throw std::invalid_argument("row " + std::to_string(row) + ": " + kt::describe(error));
  return nb::ndarray<nb::numpy, uint8_t>(
      tiles, {size_t(layout.tiles()), size_t(layout.tile_bytes())}, owner);
}

std::shared_ptr<kt::ProductBench> make_product_bench(std::shared_ptr<kt::sys::Team> team,
                                                     const std::string& table, bool gemm,
                                                     int format, int group_size, int scale_type,
                                                     int64_t n, int64_t k, const Source& w,
                                                     int64_t bytes) {
  const kt::MatrixLayout layout{kt::WeightFormat(format), n, k, group_size,
                                kt::ScaleType(scale_type)};
  return std::make_shared<kt::ProductBench>(std::move(team), find_table(table), gemm, layout,
                                            source(layout.format, w, int(kt::DType::kFP32)), bytes);
}

// A slot, and of gate, up and down the weights, the type of dense ones, and a bias or 0; of gate
// and up the order of the columns, or 0.
using SlotWeights = std::tuple<int64_t, kt::ByMatrix<Source>, kt::ByMatrix<int>,
                               kt::ByMatrix<uintptr_t>, std::array<uintptr_t, 2>>;

kt::SlotSource of_slot(const SlotWeights& given, bool scale_search) {
  const auto& [slot, weights, dtypes, biases, orders] = given;
  kt::SlotSource made{slot, {}};
  for (int m = 0; m < kt::kMatrices; ++m) {
    made.source.weights[m] = source(weights[m], dtypes[m]);
    made.source.weights[m].search = scale_search;
    made.source.bias[m] = pointer<const float>(biases[m]);
  }
  made.source.order = {pointer<const int32_t>(orders[kt::kGate]),
                       pointer<const int32_t>(orders[kt::kUp])};
  return made;
}

}  // namespace

NB_MODULE(KT_MODULE_NAME, m) {
  m.doc() = "Compiled core of kt_kernel (private).";
  // Engine processes end with their layers alive; nanobind would list them in the server's log.
  nb::set_leak_warnings(false);
  m.def("cpu_features", feature_flags, "Instruction sets this CPU and system can run.");
  m.def("cpu_brand", kt::sys::cpu_brand);
  m.def("kernel_tables", usable_tables, "Kernel tables that run here, best first.");
  m.def(
      "kernels", all_kernels,
      "(table, weight format, A operand of its GEMV, of its GEMM) of every kernel of this module, "
      "whether it runs here or not; tables best first.");
  m.def(
      "topology",
      [] {
        std::vector<std::tuple<int, int, int>> nodes;
        for (const auto& n : kt::sys::topology())
          nodes.emplace_back(n.id, int(n.cpus.size()), n.cores);
        return nodes;
      },
      "(node id, allowed CPUs, cores) of each NUMA node.");
  m.def("cpu_quota", kt::sys::cpu_quota);
  m.def("probe_read_bandwidth", kt::sys::probe_read_bandwidth, "max_threads"_a,
        nb::call_guard<nb::gil_scoped_release>());

  nb::class_<kt::sys::Team>(m, "Team", nb::is_weak_referenceable())
      .def(nb::new_(&make_team), "threads"_a, "nodes"_a)
      .def_prop_ro("pools", [](const kt::sys::Team& t) { return t.pools(); })
      .def_prop_ro("threads", [](const kt::sys::Team& t) { return t.threads(); });

  nb::class_<Ticket>(m, "Ticket")
      .def(
          "wait", [](const Ticket& t) { t.job->wait(); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("done", [](const Ticket& t) { return t.job->done(); });

  nb::class_<kt::MoeLayer>(m, "MoeLayer")
      .def(nb::new_(&make_layer), "team"_a, nb::kw_only(), "num_experts"_a, "top_k"_a,
           "hidden_size"_a, "intermediate_size"_a, "forms"_a, "cpu_slots"_a, "swiglu_limit"_a,
           "swiglu_alpha"_a, "max_tokens"_a, "table"_a, "kind"_a,
           "gemm_min_rows"_a = kt::ByMatrix<int64_t>{}, "row_block"_a = 0, "task_bytes"_a = 0)
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
          "orders"_a = std::array<uintptr_t, 2>{}, "scale_search"_a = false,
          nb::call_guard<nb::gil_scoped_release>(),
          "Weights as (data, scale, zero, global) of kernels/pack/pack.h, WeightSource. Dense ones "
          "have a number in `dtypes`, where quantised ones have -1. Column j of gate's and up's "
          "source is column order[j] of the matrix: int32 permutations, or 0.")
      .def(
          "load_many",
          [](kt::MoeLayer& layer, const std::vector<SlotWeights>& experts, bool scale_search) {
            std::vector<kt::SlotSource> sources;
            for (const SlotWeights& e : experts) sources.push_back(of_slot(e, scale_search));
            layer.load(sources);
          },
          "experts"_a, "scale_search"_a = false, nb::call_guard<nb::gil_scoped_release>(),
          "`load` of experts given as (slot, (gate, up, down), dtypes, bias addresses, orders).")
      .def(
          "load_packed",
          [](kt::MoeLayer& layer, int64_t slot, uintptr_t gate, uintptr_t up, uintptr_t down,
             uintptr_t gate_bias, uintptr_t up_bias, uintptr_t down_bias) {
            layer.load_packed(slot,
                              {pointer<const uint8_t>(gate), pointer<const uint8_t>(up),
                               pointer<const uint8_t>(down)},
                              {pointer<const float>(gate_bias), pointer<const float>(up_bias),
                               pointer<const float>(down_bias)});
          },
          "slot"_a, "gate_ptr"_a, "up_ptr"_a, "down_ptr"_a, "gate_bias_ptr"_a = 0,
          "up_bias_ptr"_a = 0, "down_bias_ptr"_a = 0, nb::call_guard<nb::gil_scoped_release>(),
          "Packed tiles of whole matrices, packed_shape() of their form, at any address. Raises "
          "ValueError for a code or scale that packing does not make; the slot must then be loaded "
          "again.")
      .def(
          "save_packed",
          [](const kt::MoeLayer& layer, int64_t slot, int matrix, uintptr_t dst) {
            layer.save_packed(slot, matrix, pointer<uint8_t>(dst));
          },
          "slot"_a, "matrix"_a, "dst_ptr"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Writes the packed tiles of a whole matrix: 0 gate, 1 up, 2 down.")
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
          "add_ptr"_a = 0, "partial_ptr"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "unpack",
          [](const kt::MoeLayer& layer, int64_t slot, int matrix, uintptr_t dst) {
            layer.unpack(slot, matrix, pointer<float>(dst));
          },
          "slot"_a, "matrix"_a, "ptr"_a)
      .def_prop_ro("packed_bytes", &kt::MoeLayer::packed_bytes)
      .def("stats",
           [](const kt::MoeLayer& layer) {
             const kt::LayerStats& s = layer.stats();
             return std::map<std::string, int64_t>{
                 {"forwards", s.forwards},         {"tokens", s.tokens},
                 {"expert_calls", s.expert_calls}, {"experts_touched", s.experts_touched},
                 {"vector_calls", s.vector_calls}, {"tile_calls", s.tile_calls},
                 {"stolen_tasks", s.stolen_tasks}};
           })
      .def(
          "set_timing", [](kt::MoeLayer& layer, bool on) { layer.timings().set(on); }, "on"_a,
          "Sets the times of timings() to zero; passes submitted later add to them while it is on.")
      .def(
          "timings",
          [](kt::MoeLayer& layer) {
            std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> result;
            for (int p = 0; p < kt::kPhaseCount; ++p)
              for (const kt::ThreadTimes& t : layer.timings().threads())
                result[kt::kPhaseNames[p]].emplace_back(t.work[p], t.wait[p]);
            return result;
          },
          "Per phase: nanoseconds of (work, waiting for other threads) of each thread.");

  nb::class_<kt::ProductBench>(m, "ProductBench",
                               "Times one kernel (benchmarks). Dense weights are float32.")
      .def(nb::new_(&make_product_bench), "team"_a, nb::kw_only(), "table"_a, "gemm"_a, "format"_a,
           "group_size"_a, "scale_type"_a, "n"_a, "k"_a, "w"_a, "bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("set_rows",
           [](kt::ProductBench& bench, Floats x) {
             if (int64_t(x.shape(1)) != bench.columns())
               throw std::invalid_argument("x needs the columns of the matrix");
             bench.set_rows(x.data(), int64_t(x.shape(0)));
           })
      .def("run", &kt::ProductBench::run, "tiles"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("tile_bytes", &kt::ProductBench::tile_bytes)
      .def_prop_ro("bytes", &kt::ProductBench::bytes);

  m.def("product_quantised", product_quantised, "table"_a, "gemm"_a, "format"_a, "group_size"_a,
        "scale_type"_a, "n"_a, "w"_a, "x"_a,
        "The same for quantised weights, (data, scale, zero, global) (tests).");
  m.def(
      "packed_shape",
      [](int format, int group_size, int scale_type, int64_t n, int64_t k) {
        const kt::MatrixForm form{kt::WeightFormat(format), group_size, kt::ScaleType(scale_type)};
        kt::check_form(form, k, "");
        if (std::min(n, k) < 1 || std::max(n, k) > kt::kMaxColumns)
          throw std::invalid_argument("matrix [" + std::to_string(n) + ", " + std::to_string(k) +
                                      "]; 1 to " + std::to_string(kt::kMaxColumns) +
                                      " rows and columns are accepted");
        const kt::MatrixLayout layout = form.layout(n, k);
        return std::pair(layout.tiles(), layout.tile_bytes());
      },
      "format"_a, "group_size"_a, "scale_type"_a, "n"_a, "k"_a,
      "(tiles, bytes of a tile) of a packed matrix [n, k].");
  m.attr("layout_version") = kt::kLayoutVersion;
  m.attr("beside_team") = kt::sys::kBesideTeam;
  m.def("pack", pack, "format"_a, "group_size"_a, "scale_type"_a, "n"_a, "k"_a, "w"_a,
        "dtype"_a = 2, "scale_search"_a = false,
        "The packed tiles [tiles, bytes] of quantised weights, (data, scale, zero, global), or of "
        "dense ones of `dtype`, whose scale is 0 (tests).");
  m.def("product", product, "table"_a, "gemm"_a, "format"_a, "group_size"_a, "w"_a, "x"_a,
        "X [m, k] times the transpose of W [n, k] by one kernel (tests).");
  m.def("reference_forward", reference_forward, "x"_a, "ids"_a, "weights"_a, "gate"_a, "up"_a,
        "down"_a, nb::kw_only(), "activation_format"_a, "skip"_a, "gate_bias"_a = nb::none(),
        "up_bias"_a = nb::none(), "down_bias"_a = nb::none(), "swiglu_limit"_a = 0.0,
        "swiglu_alpha"_a = 0.0, "The layer in float64 (kernels/ref).");
  bind_stream(m);
}
