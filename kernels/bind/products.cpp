// Packing, single products, the oracle and the split of deferred experts, one by one: for tests and
// benchmarks.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../moe/product.h"
#include "../moe/product_bench.h"
#include "../ref/moe_reference.h"
#include "../stream/split.h"
#include "bind.h"
#include "sources.h"
#include "tables.h"

namespace {

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
  {
    const nb::gil_scoped_release unlocked;
    kt::moe_reference(r, y);
  }
  return nb::ndarray<nb::numpy, double>(y, {size_t(r.tokens), size_t(r.hidden_size)}, owner);
}

using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

auto run_product(const std::string& table, bool gemm, const kt::MatrixLayout& layout,
                 const kt::WeightSource& w, Floats x) {
  const auto rows = x.shape(0);
  const auto columns = size_t(layout.tiles() * kt::kTileRows);
  auto* out = new float[std::max<size_t>(1, rows * columns)];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  {
    const nb::gil_scoped_release unlocked;
    kt::single_product(*find_table(table), gemm, layout, w, x.data(), int64_t(rows), out);
  }
  return nb::ndarray<nb::numpy, float>(out, {rows, columns}, owner);
}

auto product(const std::string& table, bool gemm, int format, int group_size, Floats w, Floats x) {
  if (w.shape(1) != x.shape(1)) throw std::invalid_argument("w and x need the same columns");
  const kt::MatrixLayout layout{kt::WeightFormat(format), int64_t(w.shape(0)), int64_t(w.shape(1)),
                                group_size};
  return run_product(table, gemm, layout, {w.data(), kt::DType::kFP32}, x);
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
  {
    const nb::gil_scoped_release unlocked;
    std::vector<float> scratch(size_t(kt::pack_scratch(layout, whole.weights)));
    for (int64_t tile = 0, row = 0; tile < layout.tiles(); ++tile)
      if (const auto error = kt::pack_tile(layout, whole, tile, scratch.data(),
                                           tiles + tile * layout.tile_bytes(), &row);
          error != kt::PackError::kNone)
        throw std::invalid_argument("row " + std::to_string(row) + ": " + kt::describe(error));
  }
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
  return make_unlocked<kt::ProductBench>(std::move(team), find_table(table), gemm, layout,
                                         source(layout.format, w, int(kt::DType::kFP32)), bytes);
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
  {
    const nb::gil_scoped_release unlocked;
    std::copy_n(ids.data(), routes, immediate);
    kt::DeferredSplit(num_experts, int64_t(top_k))
        .run(weights.data(), int64_t(tokens), protected_k, immediate, deferred);
  }
  return std::pair(first, second);
}

}  // namespace

void bind_products(nb::module_& m) {
  nb::class_<kt::ProductBench>(m, "ProductBench",
                               "Times one kernel (benchmarks). Dense weights are float32.")
      .def(nb::new_(&make_product_bench), "team"_a, nb::kw_only(), "table"_a, "gemm"_a, "format"_a,
           "group_size"_a, "scale_type"_a, "n"_a, "k"_a, "w"_a, "bytes"_a, Unlocked())
      .def("set_rows",
           [](kt::ProductBench& bench, Floats x) {
             if (int64_t(x.shape(1)) != bench.columns())
               throw std::invalid_argument("x needs the columns of the matrix");
             const nb::gil_scoped_release unlocked;
             bench.set_rows(x.data(), int64_t(x.shape(0)));
           })
      .def("run", &kt::ProductBench::run, "tiles"_a, Unlocked())
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
  m.def("split_deferred", split_deferred, "ids"_a, "weights"_a, "protected_k"_a, "num_experts"_a,
        "(immediate, deferred) of int64 ids and float32 weights [T, k] (tests).");
}
