// For tests and benchmarks only: packing, single products, the oracle, the split of deferred
// experts.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../moe/form.h"
#include "../ref/moe_reference.h"
#include "../stream/split.h"
#include "../sys/need.h"
#include "../sys/task_queue.h"
#include "../testing/product.h"
#include "../testing/product_bench.h"
#include "arrays.h"
#include "bind.h"
#include "sources.h"
#include "tables.h"

namespace {

using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <int n>
using Doubles = nb::ndarray<const double, nb::ndim<n>, nb::c_contig, nb::device::cpu>;

// An array that owns its memory.
template <class T> auto make_array(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (size_t n : shape) size *= n;
  T* const data = new T[std::max<size_t>(1, size)];
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

template <class Array>
auto data_or_null(const char* name, const std::optional<Array>& a, std::vector<size_t> shape) {
  if (a) need_shape(name, *a, std::move(shape));
  return a ? a->data() : nullptr;
}

auto reference_forward(const Doubles<2>& x, const Longs& ids, const Doubles<2>& weights,
                       const std::optional<Doubles<3>>& gate, const Doubles<3>& up,
                       const Doubles<3>& down, int activation_format, const std::vector<bool>& skip,
                       const std::optional<Doubles<2>>& gate_bias,
                       const std::optional<Doubles<2>>& up_bias,
                       const std::optional<Doubles<2>>& down_bias, double swiglu_limit,
                       double swiglu_alpha, const std::string& activation, bool weight_on_input,
                       double situ_beta, double situ_linear_beta) {
  const size_t tokens = x.shape(0), hidden = x.shape(1), top_k = ids.shape(1);
  const size_t experts = up.shape(0), inter = up.shape(1);
  need_shape("ids", ids, {tokens, top_k});
  need_shape("weights", weights, {tokens, top_k});
  need_shape("up", up, {experts, inter, hidden});
  need_shape("down", down, {experts, hidden, inter});
  kt::need(skip.size() == experts, "skip has " + std::to_string(skip.size()) +
                                       " values; expected " + std::to_string(experts));
  kt::MoeReference r;
  r.tokens = int64_t(tokens);
  r.hidden_size = int64_t(hidden);
  r.top_k = int64_t(top_k);
  r.num_experts = int64_t(experts);
  r.intermediate_size = int64_t(inter);
  r.x = x.data();
  r.ids = ids.data();
  r.weights = weights.data();
  r.gate = data_or_null("gate", gate, {experts, inter, hidden});
  r.up = up.data();
  r.down = down.data();
  r.gate_bias = data_or_null("gate_bias", gate_bias, {experts, inter});
  r.up_bias = data_or_null("up_bias", up_bias, {experts, inter});
  r.down_bias = data_or_null("down_bias", down_bias, {experts, hidden});
  r.activation = kt::ActivationFormat(activation_format);
  const auto skipped = std::make_unique<bool[]>(skip.size());
  std::copy(skip.begin(), skip.end(), skipped.get());
  r.skip = skipped.get();
  r.swiglu_limit = swiglu_limit;
  r.swiglu_alpha = swiglu_alpha;
  r.function = activation;
  r.weight_on_input = weight_on_input;
  r.situ_beta = situ_beta;
  r.situ_linear_beta = situ_linear_beta;
  auto y = make_array<double>({tokens, hidden});
  const nb::gil_scoped_release unlocked;
  kt::moe_reference(r, y.data());
  return y;
}

auto run_product(const std::string& table, bool gemm, const kt::MatrixLayout& layout,
                 const kt::WeightSource& w, const Floats& x) {
  const kt::KernelTable& kernels = *find_table(table);
  auto out = make_array<float>({x.shape(0), size_t(layout.tiles() * kt::kTileRows)});
  const nb::gil_scoped_release unlocked;
  kt::single_product(kernels, gemm, layout, w, x.data(), int64_t(x.shape(0)), out.data());
  return out;
}

auto product(const std::string& table, bool gemm, int format, int group_size, const Floats& w,
             const Floats& x) {
  need_shape("x", x, {x.shape(0), w.shape(1)});
  const auto layout = layout_of(format, group_size, 0, int64_t(w.shape(0)), int64_t(w.shape(1)));
  return run_product(table, gemm, layout, {w.data(), kt::DType::kFP32}, x);
}

auto product_quantised(const std::string& table, bool gemm, int format, int group_size,
                       int scale_type, int64_t n, const Source& w, const Floats& x) {
  const auto layout = layout_of(format, group_size, scale_type, n, int64_t(x.shape(1)));
  return run_product(table, gemm, layout, source(w, -1), x);
}

auto pack(int format, int group_size, int scale_type, int64_t n, int64_t k, const Source& w,
          int dtype, bool scale_search) {
  const auto layout = layout_of(format, group_size, scale_type, n, k);
  kt::WeightSource weights = source(layout.format, w, dtype);
  weights.search = scale_search;
  auto packed = std::make_unique<kt::sys::Mapping>();
  {
    const nb::gil_scoped_release unlocked;
    *packed = kt::pack_whole(layout, weights);
  }
  uint8_t* const tiles = packed->data();
  const nb::capsule owner(packed.get(),
                          [](void* p) noexcept { delete static_cast<kt::sys::Mapping*>(p); });
  packed.release();
  return nb::ndarray<nb::numpy, uint8_t>(
      tiles, {size_t(layout.tiles()), size_t(layout.tile_bytes())}, owner);
}

auto unpack(int format, int group_size, int scale_type, int64_t n, int64_t k,
            const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& tiles) {
  const auto layout = layout_of(format, group_size, scale_type, n, k);
  need_shape("tiles", tiles, {size_t(layout.tiles()), size_t(layout.tile_bytes())});
  auto weights = make_array<float>({size_t(n), size_t(k)});
  const nb::gil_scoped_release unlocked;
  kt::unpack_matrix(layout, tiles.data(), layout.tile_bytes(), weights.data(), k);
  return weights;
}

std::shared_ptr<kt::ProductBench> make_product_bench(std::shared_ptr<kt::sys::Team> team,
                                                     const std::string& table, bool gemm,
                                                     int format, int group_size, int scale_type,
                                                     int64_t n, int64_t k, const Source& w,
                                                     int64_t bytes) {
  const auto layout = layout_of(format, group_size, scale_type, n, k);
  return make_unlocked<kt::ProductBench>(std::move(team), find_table(table), gemm, layout,
                                         source(layout.format, w, int(kt::DType::kFP32)), bytes);
}

auto split_deferred(const Longs& ids, const Floats& weights, int64_t protected_k,
                    int64_t num_experts) {
  const size_t tokens = ids.shape(0), top_k = ids.shape(1);
  need_shape("weights", weights, {tokens, top_k});
  kt::need_in_range("top_k", int64_t(top_k), 0, kt::kMaxTopK);
  kt::need_in_range("num_experts", num_experts, 1, kt::sys::kMaxTasks);
  auto immediate = make_array<int64_t>({tokens, top_k});
  auto deferred = make_array<int64_t>({tokens, top_k});
  const nb::gil_scoped_release unlocked;
  std::copy_n(ids.data(), tokens * top_k, immediate.data());
  kt::DeferredSplit(num_experts, int64_t(top_k))
      .run(weights.data(), int64_t(tokens), protected_k, immediate.data(), deferred.data());
  return std::pair(std::move(immediate), std::move(deferred));
}

}  // namespace

void bind_testing(nb::module_& m) {
  nb::class_<kt::ProductBench>(
      m, "ProductBench",
      "Times one kernel (benchmarks). Dense weights are float32. Addresses are only checked for 0.")
      .def(nb::new_(&make_product_bench), "team"_a, nb::kw_only(), "table"_a, "gemm"_a, "format"_a,
           "group_size"_a, "scale_type"_a, "n"_a, "k"_a, "w"_a, "bytes"_a, Unlocked())
      .def("set_rows",
           [](kt::ProductBench& bench, const Floats& x) {
             need_shape("x", x, {x.shape(0), size_t(bench.columns())});
             const nb::gil_scoped_release unlocked;
             bench.set_rows(x.data(), int64_t(x.shape(0)));
           })
      .def("run", &kt::ProductBench::run, "tiles"_a, Unlocked())
      .def_prop_ro("tile_bytes", &kt::ProductBench::tile_bytes)
      .def_prop_ro("bytes", &kt::ProductBench::bytes);

  m.def("product_quantised", product_quantised, "table"_a, "gemm"_a, "format"_a, "group_size"_a,
        "scale_type"_a, "n"_a, "w"_a, "x"_a,
        "The same for quantised weights, (data, scale, zero, global) (tests). Addresses are only "
        "checked for 0.");
  m.def("pack", pack, "format"_a, "group_size"_a, "scale_type"_a, "n"_a, "k"_a, "w"_a,
        "dtype"_a = 2, "scale_search"_a = false,
        "The packed tiles [tiles, bytes] of quantised weights, (data, scale, zero, global), or of "
        "dense weights of `dtype`, whose scale is 0 (tests). Addresses are only checked for 0.");
  m.def("unpack", unpack, "format"_a, "group_size"_a, "scale_type"_a, "n"_a, "k"_a, "tiles"_a,
        "The float32 weights [n, k] of packed tiles [tiles, bytes] (tests).");
  m.def("product", product, "table"_a, "gemm"_a, "format"_a, "group_size"_a, "w"_a, "x"_a,
        "X [m, k] times the transpose of W [n, k] by one kernel (tests).");
  m.def("reference_forward", reference_forward, "x"_a, "ids"_a, "weights"_a, "gate"_a.none(),
        "up"_a, "down"_a, nb::kw_only(), "activation_format"_a, "skip"_a,
        "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(), "down_bias"_a = nb::none(),
        "swiglu_limit"_a = 0.0, "swiglu_alpha"_a = 0.0, "activation"_a = "silu",
        "weight_on_input"_a = false, "situ_beta"_a = 1.0, "situ_linear_beta"_a = 0.0,
        "The layer in float64 (kernels/ref). Experts without gate: gate is None.");
  m.def("split_deferred", split_deferred, "ids"_a, "weights"_a, "protected_k"_a, "num_experts"_a,
        "(immediate, deferred) of int64 ids and float32 weights [T, k] (tests).");
}
