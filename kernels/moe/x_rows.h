// The rows of x that gate and up are multiplied with.
#pragma once
#include "pass.h"

namespace kt {

// A part of a batch that is computed at a time, at most max_tokens tokens.
struct Chunk {
  const ForwardArgs& args;
  int64_t first, count;
  bool own;  // every thread makes the plan and the rows of x for itself
};

// GEMV kernels read the chunk's tokens by index. An expert has rows of its own (gathered) if a GEMM
// kernel needs another kind of rows. If columns have an order (act-order), all experts have their
// own. Matrices whose kernels need the same rows share them.
class XRows {
 public:
  XRows(Pass& pass, const Chunk& chunk);

  // The chunk's tokens [first, last) for GEMV kernels.
  void convert(int64_t first, int64_t last) const;

  // Whether any expert has rows of its own; makes those of its pairs [first, last).
  bool gathers(const Plan& plan) const;
  void gather(const Plan& plan, const ExpertRows& e, int64_t first, int64_t last) const;

  // The rows that gate or up of an expert is multiplied with.
  ActRows rows(const Plan& plan, const ExpertRows& e, Matrix m) const;

 private:
  // `m` is gate or up in all of these.
  bool gemm_gathers(Matrix m) const;
  bool gathers(const ExpertRows& e, Matrix m) const {
    return order_ || (e.gemm[m] && gemm_gathers(m));
  }
  bool shares_gathered(const ExpertRows& e) const;
  ActRows of_tokens(Matrix m) const;
  ActRows gathered(const ExpertRows& e, Matrix m) const;
  void gather_row(const ExpertRows& e, Matrix m, int64_t token, int64_t row) const;
  const void* source(int64_t token) const;
  const void* in_order(const ExpertRows& e, Matrix m, const void* row) const;
  void quantise(ActKind act, const void* src, const ActRows& to, int64_t row) const;

  Pass& pass_;
  const Chunk& chunk_;
  const OrderTable* const order_;  // null where no expert has orders
  const int64_t columns_;          // of a row, whichever of the two it is for
  const bool shares_tokens_;       // up has none of its own
  RowPointers tokens_[2];          // for gate, and for up where it wants others
};

}  // namespace kt
