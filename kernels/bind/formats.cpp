// Gives Python the rows of kt/format.h: what src/kt_kernel/weights/formats.py uses, and everything
// that code on another device needs to unpack a tile.
#include <iterator>

#include "../pack/scalar.h"
#include "bind.h"
#include "kt/layout.h"

namespace {

using kt::CodeType;
using kt::FormatTraits;
using kt::ScaleKind;

constexpr const char* kCodeTypes[] = {"bf16", "signed", "unsigned", "e4m3", "e2m1", "iq4"};
constexpr const char* kScaleKinds[] = {"none", "row", "block", "group", "ue8m0", "e4m3", "ggml"};
static_assert(std::size(kCodeTypes) == size_t(CodeType::kIq4) + 1);
static_assert(std::size(kScaleKinds) == size_t(ScaleKind::kGgml) + 1);

float value_of(const FormatTraits::Codes& codes, int code) {
  switch (codes.type) {
    case CodeType::kSigned: return int8_t(code);
    case CodeType::kE4m3: return kt::e4m3_to_float(uint8_t(code));
    case CodeType::kE2m1: return kt::e2m1_to_float(uint8_t(code));
    case CodeType::kIq4: return kt::kIq4Values[code];
    default: return float(code - codes.offset);
  }
}

nb::object code_values(const FormatTraits::Codes& codes) {
  if (codes.type == CodeType::kBf16) return nb::none();
  nb::list values;
  for (int code = 0; code < 1 << codes.bits; ++code) values.append(value_of(codes, code));
  return nb::tuple(values);
}

nb::tuple planes(int bits) {
  const int low = kt::low_plane_bits(bits);
  return bits == low ? nb::make_tuple(low) : nb::make_tuple(low, bits - low);
}

nb::dict row_of(const FormatTraits& f) {
  nb::dict row;
  row["name"] = f.name;
  row["id"] = int(f.format);
  row["title"] = f.title;
  row["code_type"] = kCodeTypes[int(f.codes.type)];
  row["bits"] = f.codes.bits;
  row["planes"] = planes(f.codes.bits);
  nb::list order;
  for (int i = 0; i < 4; ++i) order.append(f.codes.type == CodeType::kE4m3 ? kt::kE4m3Order[i] : i);
  row["byte_order"] = nb::tuple(order);
  row["code_values"] = code_values(f.codes);
  row["scale_kind"] = kScaleKinds[int(f.scales.kind)];
  row["scale_columns"] = f.scales.cols;
  row["scale_bits"] = f.scales.bits;
  row["sums"] = f.scales.sums;
  row["zero_points"] = f.scales.zero;
  row["minimum"] = f.scales.minimum;
  row["head_bytes"] = f.head_bytes;
  row["block_columns"] = f.block_cols;
  row["block_scale_bytes"] = f.scale_bytes;
  row["column_unit"] = f.column_unit;
  row["file_bytes"] = f.file_bytes;
  row["from_dense"] = f.from_dense;
  return row;
}

}  // namespace

void bind_formats(nb::module_& m) {
  nb::list rows;
  for (const FormatTraits& f : kt::kFormats) rows.append(row_of(f));
  m.attr("weight_formats") = nb::tuple(rows);
}
