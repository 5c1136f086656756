// The rows of h, the activations between gate and up and down, in this worker's pool.
#pragma once
#include "pass.h"

namespace kt {

// Most kinds of rows are converted tile by tile. A kind with one scale per row (int8) needs the
// whole row, of all pools, so it is stored as float32 until then.
class HRows {
 public:
  explicit HRows(Pass& pass)
      : pass_(pass), layout_(pass.part().layout[kDown]), table_(*pass.layer.config.table) {}

  // Whether the expert's rows must be converted as a whole, and whether those of any expert must.
  bool whole(const ExpertRows& e) const { return pass_.kernel(e, kDown).act == ActKind::kInt8Row; }
  bool any_whole(const Plan& plan) const;

  // Stores a tile of h, rows [first, first + m) of the expert: converted, or as float32.
  void keep(const ExpertRows& e, const float* values, int64_t first, int64_t m, int64_t tile) const;
  // Converts a whole row after all its tiles are stored.
  void quantise(const ExpertRows& e, const ActRows& to, int64_t row) const;

  // The rows that down of an expert is multiplied with, and this thread's buffer for whole rows.
  ActRows rows(const ExpertRows& e) const;
  ActRows own() const;

 private:
  void quantise_tile(const ActRows& to, const ProductKernel& kernel, const float* values,
                     int64_t row, int64_t tile, int64_t valid) const;
  int64_t whole_stride() const { return round_up(pass_.layer.config.intermediate_size, kTileRows); }
  float* whole_row(const ExpertRows& e, int64_t row) const {
    return as<float>(pass_.work.h_float) + (e.row + row) * whole_stride();
  }

  Pass& pass_;
  const MatrixLayout& layout_;
  const KernelTable& table_;
};

}  // namespace kt
