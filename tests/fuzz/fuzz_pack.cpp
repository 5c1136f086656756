// Fuzzes kernels/pack. Any matrix and any part of one is refused, or packed and then unpacked to
// the weights of its source. Packed tiles are saved and loaded; changed ones are refused or
// multiplied.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kt/kernel_table.h"
#include "moe/act_rows.h"
#include "pack/packed.h"
#include "source.h"
#include "sys/cpu_features.h"
#include "tiles.h"

namespace fuzz {
namespace {

using kt::PackError;

// Sizes in units that a format accepts. Few columns are more frequent than many.
int64_t columns(Input& in, int64_t unit) {
  const int64_t most = std::max<int64_t>(1, (in.byte() % 8 ? 192 : 1100) / unit);
  return unit * in.between(1, most);
}

bool same(double expected, float got) {
  const float rounded = float(expected);
  return std::isnan(rounded) ? std::isnan(got) : rounded == got;
}

// Whether packing accepts such a source. Other errors depend on the values.
PackError kind_error(const MatrixLayout& layout, const kt::WeightSource& w) {
  const bool dense = !w.scale && !w.blocks, scaled = w.scale && !w.blocks;
  if (kt::is_ggml(layout.format)) return w.blocks ? PackError::kNone : PackError::kNeedsBlocks;
  switch (layout.format) {
    case WeightFormat::kBF16: return dense ? PackError::kNone : PackError::kNeedsDense;
    case WeightFormat::kInt4Group:
      if (dense && layout.scale != ScaleType::kFP16) return PackError::kNeedsFp16Scales;
      [[fallthrough]];
    case WeightFormat::kInt8Row:
    case WeightFormat::kInt4Row:
      return dense || scaled ? PackError::kNone : PackError::kNeedsQuantised;
    case WeightFormat::kInt4Zero:
      if (scaled && !w.zero) return PackError::kNeedsZeros;
      [[fallthrough]];
    default: return scaled ? PackError::kNone : PackError::kNeedsQuantised;
  }
}

// Checks dense weights in a format: they are close, and the scale fits them.
void check_dense(const MatrixLayout& layout, const MatrixSource& source, const float* unpacked) {
  const kt::WeightSource& w = source.weights;
  const auto exact = [&](int64_t n, int64_t k) {
    return float_at(w.data, w.dtype, (source.row0 + n) * source.cols + k);
  };
  const double limit = layout.format == WeightFormat::kInt8Row ? 127 : 7;
  for (int64_t n = 0; n < layout.rows; ++n) {
    double most = 0;
    if (!layout.has_group())
      for (int64_t k = 0; k < source.cols; ++k) most = std::max(most, std::fabs(exact(n, k)));
    double lost = 0, plain_loss = 0, square = 0;
    for (int64_t k = 0; k < layout.cols; ++k) {
      const double x = exact(n, source.col0 + k), got = unpacked[n * layout.cols + k];
      if (layout.format == WeightFormat::kBF16) {
        uint32_t bits;
        const float single = float(x);
        std::memcpy(&bits, &single, 4);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
        float rounded;
        std::memcpy(&rounded, &bits, 4);
        REQUIRE(std::isnan(x) ? std::isnan(got) : rounded == got);
        continue;
      }
      if (layout.has_group() && k % layout.group == 0) {
        most = lost = plain_loss = square = 0;
        for (int64_t j = k; j < k + layout.group; ++j)
          most = std::max(most, std::fabs(exact(n, source.col0 + j)));
      }
      double scale = double(float(most) / float(limit));
      if (layout.has_group()) {  // the nearest fp16
        const double unit = std::ldexp(1.0, std::max(std::ilogb(std::max(scale, 1e-30)), -14) - 10);
        scale = std::nearbyint(scale / unit) * unit;
      } else if (!std::isfinite(float(limit) / float(most))) {
        scale = 0;
      }
      const double clipped = std::max(0.0, std::fabs(x) - limit * scale);
      const double error = std::fabs(x - got);
      const double most_error = scale == 0 ? std::fabs(x) : std::max(0.5 * scale, clipped);
      if (!w.search) {
        REQUIRE(error <= most_error * (1 + 1e-4) + 1e-6 * std::fabs(x));
        continue;
      }
      const double q = scale == 0 ? 0 : std::clamp(std::nearbyint(x / scale), -limit, limit);
      lost += error * error, plain_loss += (x - q * scale) * (x - q * scale), square += x * x;
      if ((k + 1) % layout.group == 0) REQUIRE(lost <= plain_loss + 1e-4 * square);
    }
  }
}

// Copies a tile to files and back, whole and in parts of columns.
void take_and_put(Input& in, const MatrixLayout& layout, const Bytes& tile, bool must_be_good) {
  const int64_t unit = layout.split_unit(), units = (layout.cols + unit - 1) / unit;
  const int64_t at = unit * in.below(units);
  Bytes file(tile.size(), 1), merged(tile.size()), expected(tile.size());
  file.copy(tile), expected.copy(tile);
  as_saved(layout, expected.data());
  std::memset(merged.data(), 0, size_t(layout.head_bytes()));
  PackError first = PackError::kNone;
  for (const auto& [begin, end] : {std::pair(int64_t{0}, at), std::pair(at, layout.cols)}) {
    if (begin == end) continue;
    MatrixLayout part = layout;
    part.cols = end - begin;
    Bytes own(part.tile_bytes());
    int64_t lane = -1;
    const PackError error =
        kt::take_columns(kt::PackedColumns(layout, file.data(), begin, part), own.data(), &lane);
    if (error != PackError::kNone) {
      REQUIRE(lane >= 0 && lane < 32 && *kt::describe(error));
      if (first == PackError::kNone) first = error;
      continue;
    }
    kt::put_columns(part, own.data(), layout, begin, merged.data());
  }
  REQUIRE(!must_be_good || first == PackError::kNone);
  if (first == PackError::kNone) REQUIRE(merged == expected);
  // The whole tile is good if its parts are.
  Bytes whole(tile.size());
  int64_t lane = -1;
  const kt::PackedColumns all(layout, file.data(), 0, layout);
  const PackError error = kt::take_columns(all, whole.data(), &lane);
  REQUIRE((error == PackError::kNone) == (first == PackError::kNone));
  REQUIRE((error == PackError::kNone) == good_tile(layout, file.data()));
  if (error == PackError::kNone) REQUIRE(whole == expected);
}

// Multiplies a few rows with a tile, by every kernel that runs here. Other tests check the values.
void multiply(Input& in, const MatrixLayout& layout, const Bytes& tile) {
  int tables = 0;
  while (kt::kKernelTables[tables]) ++tables;
  const kt::KernelTable& table = *kt::kKernelTables[in.byte() % 4 ? tables - 1 : in.below(tables)];
  if (table.features & ~kt::sys::cpu_features()) return;
  const kt::FormatKernels& kernels = table.format[int(layout.format)];
  const kt::ProductKernel& kernel = in.flag() ? kernels.gemm : kernels.gemv;
  const int64_t m = in.between(1, in.byte() % 4 ? 5 : 40), padded = layout.cols_padded();
  const int64_t stride = padded * kt::act_bytes(kernel.act);
  const int64_t scales = kt::act_scales(kernel.act, padded),
                sums = kt::act_sums(kernel.act, padded);
  Bytes x(layout.cols * 4), row(stride), rows((m + kt::kRowSlack) * stride, 0, 0);
  Bytes scale(m * scales * 4), sum(m * sums * 4), out((m + kt::kRowSlack) * 32 * 4);
  Random random(in.word());
  const Style kind = style(in);
  table.thread_begin();
  for (int64_t r = 0; r < m; ++r) {
    fill_floats(random, kind, DType::kFP32, true, x.data(), layout.cols);
    table.quantise[int(kernel.act)](x.data(), DType::kFP32, layout.cols, padded, -1, row.data(),
                                    scale.as<float>() + r * scales, sum.as<int32_t>() + r * sums);
    if (kernel.blocked)
      kt::copy_to_blocks(row.data(), stride, rows.data(), r);
    else
      std::memcpy(rows.data() + r * stride, row.data(), size_t(stride));
  }
  const kt::ActRows a{rows.data(), stride, scale.as<float>(), sum.as<int32_t>(), scales,
                      sums,        nullptr};
  kernel.product(tile.data(), layout, a, m, out.as<float>());
  Bytes again(out.size());
  kernel.product(tile.data(), layout, a, m, again.as<float>());
  table.thread_end();
  REQUIRE(!std::memcmp(out.data(), again.data(), size_t(m * 32 * 4)));
}

void change(Input& in, const MatrixLayout& layout, Bytes& tile) {
  if (in.byte() % 4 == 0) {
    Random(in.word()).fill(tile.data(), tile.size());
  } else {
    tile.patch(in, int(in.between(1, 6)));
  }
  take_and_put(in, layout, tile, false);
  Bytes loaded(tile.size());
  int64_t lane = 0;
  const kt::PackedColumns all(layout, tile.data(), 0, layout);
  if (kt::take_columns(all, loaded.data(), &lane) != PackError::kNone) return;
  MatrixLayout full = layout;
  full.rows = 32;
  Bytes unpacked(32 * layout.cols * 4);
  kt::unpack_matrix(full, loaded.data(), 0, unpacked.as<float>(), layout.cols);
  if (in.flag()) multiply(in, layout, loaded);
}

void run(Input& in) {
  MatrixLayout layout = form(in);
  const int kind = int(in.below(8));  // 0 to 3: dense; otherwise quantised; 7: of another format
  const bool nibbles = layout.code_bits() == 4 && !kt::is_ggml(layout.format);
  const int64_t unit = std::max<int64_t>(layout.column_unit(), nibbles ? 2 : 1);
  const int64_t rows = in.between(1, in.byte() % 8 ? 33 : 160), cols = columns(in, unit);
  Matrix matrix;
  if (kind < 3) {
    matrix.dense(in, DType(in.below(3)), rows, cols);
  } else if (kind < 7) {
    matrix.quantised(in, layout, rows, cols);
  } else {  // any data: only its kind matters
    matrix.data = std::make_unique<Bytes>(0);
    const void* p = matrix.data->data();
    matrix.weights = {p, DType::kFP32, in.flag() ? p : nullptr, nullptr, 1, in.flag(), in.flag()};
    if (kind_error(layout, matrix.weights) == PackError::kNone) return;
  }
  if (layout.format == WeightFormat::kInt4Group) matrix.weights.search = in.flag();
  const int64_t row_unit = layout.format == WeightFormat::kFp8Block ? 32 : 1;
  const int64_t split = layout.split_unit();
  const int64_t row0 = in.below((rows + row_unit - 1) / row_unit) * row_unit;
  const int64_t col0 = in.below((cols + split - 1) / split) * split;
  layout.rows = in.between(1, rows - row0);
  layout.cols = in.flag() ? cols - col0 : std::min(cols - col0, split * in.between(1, 4));
  const MatrixSource source{matrix.weights, cols, row0, col0};
  const bool dense = !matrix.weights.scale && !matrix.weights.blocks;

  Bytes packed(layout.bytes()), again(layout.bytes(), 0, 0x5a);
  Bytes scratch(kt::pack_scratch(layout, matrix.weights) * 4);
  const PackError by_kind = kind_error(layout, matrix.weights);
  bool good = true;
  for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
    int64_t bad_row = -1, expected_row = row0 + tile * 32;
    const PackError error = kt::check_tile(layout, source, tile, &bad_row);
    const int64_t last = std::min(expected_row + 32, row0 + layout.rows);
    if (by_kind != PackError::kNone) {
      REQUIRE(error == by_kind && bad_row == expected_row && !kt::is_of_a_row(error));
      return;
    }
    if (!dense)
      for (; expected_row < last; ++expected_row) {
        bool all = true;
        for (int64_t k = 0; k < layout.cols && all; ++k)
          all = acceptable(layout, source, expected_row, col0 + k);
        if (!all) break;
      }
    const int64_t at = tile * layout.tile_bytes();
    int64_t row = -1;
    const auto pack = [&](const Bytes& to) {
      return kt::pack_tile(layout, source, tile, scratch.as<float>(), to.data() + at, &row);
    };
    const PackError packing = pack(packed);
    if (error != PackError::kNone) {
      REQUIRE(bad_row >= row0 + tile * 32 && bad_row < last && *kt::describe(error));
      if (!dense) REQUIRE(bad_row == expected_row);
      // Dense rows are checked as a whole but packed in groups, so the first bad row may differ.
      if (layout.cols == cols || !layout.has_group() || !dense)
        REQUIRE(packing != PackError::kNone && row == bad_row);
      good = false;
      continue;
    }
    REQUIRE(dense || expected_row == last);
    REQUIRE(packing == PackError::kNone && pack(again) == PackError::kNone);
    REQUIRE(!std::memcmp(packed.data() + at, again.data() + at, size_t(layout.tile_bytes())));
  }
  if (!good) return;
  Bytes unpacked(layout.rows * layout.cols * 4);
  kt::unpack_matrix(layout, packed.data(), layout.tile_bytes(), unpacked.as<float>(), layout.cols);
  if (dense) {
    check_dense(layout, source, unpacked.as<float>());
  } else {
    const int64_t all = layout.rows * layout.cols, step = all > 1024 ? 1 + 2 * in.below(8) : 1;
    for (int64_t i = in.below(step); i < all; i += step)
      REQUIRE(same(weight(layout, source, row0 + i / layout.cols, col0 + i % layout.cols),
                   unpacked.as<float>()[i]));
  }
  Bytes tile(layout.tile_bytes());
  std::memcpy(tile.data(), packed.data() + in.below(layout.tiles()) * tile.size(),
              size_t(tile.size()));
  take_and_put(in, layout, tile, true);
  if (in.byte() % 4 == 0) multiply(in, layout, tile);
  change(in, layout, tile);
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input in(data, size);
  fuzz::run(in);
  return 0;
}
