#include "form.h"

#include "../sys/need.h"

namespace kt {

void need_in_range(const std::string& name, int64_t value, int64_t least, int64_t most) {
  need(value >= least && value <= most, name + " " + std::to_string(value) + "; accepted: " +
                                            std::to_string(least) + " to " + std::to_string(most));
}

void need_dtype(const std::string& name, DType dtype) {
  need(dtype == DType::kBF16 || dtype == DType::kFP16 || dtype == DType::kFP32,
       name + " " + std::to_string(int(dtype)) +
           "; accepted: 0 (bfloat16), 1 (float16), 2 (float32)");
}

void check_form(const MatrixForm& form, int64_t columns, const std::string& where) {
  need(int(form.format) >= 0 && int(form.format) < kFormatCount,
       where + "unknown weight format " + std::to_string(int(form.format)) + "; accepted: 0 to " +
           std::to_string(kFormatCount - 1));
  const MatrixLayout any = form.layout(1, 1);
  if (any.has_group())
    need(form.group >= 32 && form.group % 32 == 0,
         where + "group size " + std::to_string(form.group) + " must be a multiple of 32");
  else
    need(form.group == 0, where + "group size " + std::to_string(form.group) +
                              "; this weight format has no groups; accepted: 0");
  need(int(form.scale) >= 0 && int(form.scale) <= int(ScaleType::kFP32),
       where + "unknown scale type " + std::to_string(int(form.scale)) + "; accepted: 0 to " +
           std::to_string(int(ScaleType::kFP32)));
  need(columns % any.column_unit() == 0, where + std::to_string(columns) +
                                             " columns; this weight format needs a multiple of " +
                                             std::to_string(any.column_unit()));
}

MatrixLayout checked_layout(const MatrixForm& form, int64_t rows, int64_t columns) {
  need(rows >= 1 && rows <= kMaxColumns && columns >= 1 && columns <= kMaxColumns,
       "matrix [" + std::to_string(rows) + ", " + std::to_string(columns) + "]; accepted: 1 to " +
           std::to_string(kMaxColumns) + " rows and columns");
  check_form(form, columns, "");
  return form.layout(rows, columns);
}

void check_source(const WeightSource& source, const std::string& name) {
  need(source.data != nullptr, name + ": address 0; expected the address of the weights");
  need_dtype(name + ": dtype", source.dtype);
}

}  // namespace kt
