// Fuzzes kernels/moe. Any layer is refused or created. Any bytes as packed weights are refused by
// name, or loaded, saved unchanged and multiplied, by one to three pools.
#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

#include "moe/layer.h"
#include "source.h"
#include "sys/cpu_features.h"
#include "tiles.h"

namespace fuzz {
namespace {

using kt::ByMatrix;
using kt::LayerConfig;
using kt::Matrix;
using Source = fuzz::Matrix;
using Team = std::shared_ptr<kt::sys::Team>;

const Team& team(int64_t number) {
  static const auto of = [](std::vector<kt::sys::PoolSpec> pools) {
    return std::make_shared<kt::sys::Team>(std::move(pools));
  };
  static const Team teams[] = {of({{1, -1}}), of({{2, -1}}), of({{1, -1}, {1, -1}}),
                               of({{1, -1}, {0, -1}, {1, -1}})};
  return teams[number];
}
constexpr int64_t kTeams = 4;

LayerConfig config(Input& in) {
  LayerConfig c{};
  const bool mixed = in.flag();
  int64_t unit[3];
  for (int m = 0; m < kt::kMatrices; ++m) {
    const MatrixLayout f = m > 0 && !mixed ? c.forms[0].layout(1, 1) : form(in);
    c.forms[size_t(m)] = {f.format, f.group, f.scale};
    unit[m] = std::max<int64_t>(f.column_unit(), f.format == WeightFormat::kInt4Row ? 2 : 1);
  }
  const auto size = [&](int64_t of) { return of * in.between(1, std::max<int64_t>(1, 100 / of)); };
  c.hidden_size = size(std::lcm(unit[0], unit[1]));
  c.intermediate_size = size(unit[2]);
  c.num_experts = in.between(1, 3);
  c.top_k = in.between(1, 3);
  c.max_tokens = in.between(1, 24);
  for (int64_t i = 0; i < c.num_experts; ++i) c.on_cpu.push_back(in.byte() % 4 != 3);
  if (in.flag()) c.activation = {7.0f, 1.702f};
  int tables = 0;
  while (kt::kKernelTables[tables]) ++tables;
  c.table = kt::kKernelTables[in.byte() % 4 ? tables - 1 : in.below(tables)];
  if (c.table->features & ~kt::sys::cpu_features()) c.table = kt::kKernelTables[tables - 1];
  c.kind = kt::KernelKind(in.below(3));
  if (in.flag()) {
    for (int64_t& rows : c.tuning.gemm_min_rows) rows = in.below(20);
    c.tuning.row_block = 32 * in.below(9);
    c.tuning.task_bytes = in.below(65536);
  }
  return c;
}

// Changes one number to a value that may be invalid.
void distort(Input& in, LayerConfig& c) {
  constexpr int64_t kNumbers[] = {0, -1, 1, 3, 33, 64, 65536, 65537, INT64_MAX, INT64_MIN};
  const int64_t x = kNumbers[in.below(10)];
  switch (in.below(11)) {
    case 0: c.num_experts = x; break;
    case 1: c.top_k = x; break;
    case 2: c.hidden_size = x; break;
    case 3: c.intermediate_size = x; break;
    case 4: c.max_tokens = x; break;
    case 5: c.forms[size_t(in.below(3))].group = int(x); break;
    case 6: c.forms[size_t(in.below(3))].format = WeightFormat(int(x)); break;
    case 7: c.forms[size_t(in.below(3))].scale = ScaleType(int(x)); break;
    case 8: c.tuning.row_block = x; break;
    case 9: c.tuning.gemm_min_rows[size_t(in.below(3))] = x; break;
    default: c.tuning.task_bytes = x; break;
  }
}

// The error, "" if there is none.
template <class F> std::string problem_of(F call) {
  try {
    call();
  } catch (const std::invalid_argument& e) {
    REQUIRE(*e.what());
    return e.what();
  }
  return "";
}

// The packed tiles of one matrix of an expert.
struct Tiles {
  MatrixLayout layout;
  Source source;
  std::unique_ptr<Bytes> bytes;
  bool good = true;

  // Packs a source, as far as possible.
  void pack(Input& in) {
    source.quantised(in, layout, layout.rows, layout.cols);
    const kt::MatrixSource whole{source.weights, layout.cols, 0, 0};
    bytes = std::make_unique<Bytes>(layout.bytes(), 0, 0);
    Bytes scratch(kt::pack_scratch(layout, source.weights) * 4);
    good = true;
    for (int64_t tile = 0, row = 0; tile < layout.tiles() && good; ++tile)
      good =
          kt::pack_tile(layout, whole, tile, scratch.as<float>(),
                        bytes->data() + tile * layout.tile_bytes(), &row) == kt::PackError::kNone;
  }

  // Damages the tiles as in a file, at any address.
  void damage(Input& in) {
    auto file = std::make_unique<Bytes>(bytes->size(), 1);
    file->copy(*bytes);
    bytes = std::move(file);
    const int how = in.byte() % 8;
    if (how == 7) Random(in.word()).fill(bytes->data(), bytes->size());
    if (how >= 4) bytes->patch(in, how);
    good = true;
    for (int64_t tile = 0; tile < layout.tiles() && good; ++tile)
      good = good_tile(layout, bytes->data() + tile * layout.tile_bytes());
  }
};

using Expert = ByMatrix<Tiles>;

Expert expert(Input& in, const LayerConfig& c, bool packed) {
  Expert e;
  for (size_t m = 0; m < kt::kMatrices; ++m) {
    e[m].layout = c.layout(Matrix(m));
    e[m].pack(in);
    if (packed) e[m].damage(in);
  }
  return e;
}

void check_saved(const kt::MoeLayer& layer, int64_t slot, const Expert& e) {
  for (int m = 0; m < kt::kMatrices; ++m) {
    const Tiles& t = e[size_t(m)];
    Bytes expected(t.bytes->size()), saved(t.bytes->size(), 1, 0x5a);
    expected.copy(*t.bytes);
    for (int64_t tile = 0; tile < t.layout.tiles(); ++tile)
      as_saved(t.layout, expected.data() + tile * t.layout.tile_bytes());
    layer.save_packed(slot, m, saved.data());
    REQUIRE(saved == expected);
    Bytes unpacked(t.layout.rows * t.layout.cols * 4);
    layer.unpack(slot, m, unpacked.as<float>());
  }
}

void load(Input& in, kt::MoeLayer& layer, int64_t slot) {
  const LayerConfig& c = layer.config();
  Random random(in.word());
  for (;;) {
    const bool packed = in.byte() % 4 != 3;
    Expert e = expert(in, c, packed);
    ByMatrix<std::unique_ptr<Bytes>> bias;
    ByMatrix<const uint8_t*> tiles;
    ByMatrix<const float*> biases{};
    for (size_t m = 0; m < kt::kMatrices; ++m) {
      tiles[m] = e[m].bytes->data();
      if (!in.flag()) continue;
      bias[m] = std::make_unique<Bytes>(e[m].layout.rows * 4);
      fill_floats(random, style(in), DType::kFP32, true, bias[m]->data(), e[m].layout.rows);
      biases[m] = bias[m]->as<float>();
    }
    const std::string problem = problem_of([&] {
      if (packed) return layer.load_packed(slot, tiles, biases);
      layer.load(
          {{slot, {{e[0].source.weights, e[1].source.weights, e[2].source.weights}, biases}}});
    });
    const bool held = slot >= 0 && slot < c.num_experts && c.on_cpu[size_t(slot)];
    const bool good = e[0].good && e[1].good && e[2].good;
    REQUIRE(problem.empty() == (held && good));
    const std::string place = "expert slot " + std::to_string(slot);
    REQUIRE(problem.empty() || problem.starts_with(place));
    if (problem.empty()) check_saved(layer, slot, e);
    // When the input's bytes run out, nothing is damaged, and the expert is good.
    if (!held || problem.empty()) return;
  }
}

void forward(Input& in, kt::MoeLayer& layer) {
  const LayerConfig& c = layer.config();
  const int64_t tokens = in.below(in.byte() % 4 ? 6 : 41), values = tokens * c.hidden_size;
  const auto dtype = DType(in.below(3));
  const int size = kt::dtype_bytes(dtype);
  Random random(in.word());
  Bytes x(values * size), ids(tokens * c.top_k * 8), weights(tokens * c.top_k * 4);
  Bytes add(values * 4), out(values * size), again(values * size);
  Bytes partial(values * 4);
  fill_floats(random, style(in), dtype, true, x.data(), values);
  fill_floats(random, style(in), DType::kFP32, true, weights.data(), tokens * c.top_k);
  fill_floats(random, style(in), DType::kFP32, true, add.data(), values);
  const bool strange = in.flag();
  for (int64_t i = 0; i < tokens * c.top_k; ++i) {
    const int64_t beyond[] = {-1, c.num_experts, INT64_MAX, INT64_MIN};
    ids.as<int64_t>()[i] = strange && random.below(4) == 0
                               ? beyond[random.below(4)]
                               : int64_t(random.below(uint64_t(c.num_experts)));
  }
  kt::ForwardArgs args{x.data(),
                       dtype,
                       tokens,
                       ids.as<int64_t>(),
                       weights.as<float>(),
                       out.data(),
                       in.flag() ? add.as<float>() : nullptr,
                       nullptr};
  layer.submit(args)->wait();
  if (in.flag()) {
    args.out = again.data();
    layer.submit(args)->wait();
    REQUIRE(out == again);
  } else {
    args.partial = partial.as<float>();
    layer.submit(args)->wait();
  }
}

void run(Input& in) {
  LayerConfig c = config(in);
  const bool distorted = in.byte() % 16 == 15;
  if (distorted) distort(in, c);
  const Team& of = team(in.below(kTeams));
  std::unique_ptr<kt::MoeLayer> layer;
  try {
    const std::string problem = problem_of([&] { layer = std::make_unique<kt::MoeLayer>(of, c); });
    REQUIRE(problem.empty() || distorted);
  } catch (const std::bad_alloc&) {
    REQUIRE(distorted);
  }
  if (!layer || std::max(c.hidden_size, c.intermediate_size) > 1024) return;
  for (int64_t slot = 0; slot < c.num_experts; ++slot) load(in, *layer, slot);
  if (in.byte() % 8 == 0) load(in, *layer, in.flag() ? -1 : c.num_experts);
  forward(in, *layer);
  if (in.flag()) forward(in, *layer);
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input in(data, size);
  fuzz::run(in);
  return 0;
}
