// The rows of x that gate and up are multiplied with.
#pragma once
#include "pass.h"

namespace kt {

// The part of a batch that is computed at a time, at most max_tokens tokens.
struct Chunk {
  const ForwardArgs& args;
  int64_t first, count;
  bool own;  // every thread makes the plan and the rows of x itself
};

// GEMV kernels read the chunk's tokens by index. An expert has its own (gathered) rows if a GEMM
// kernel needs another kind of rows. If columns have an order (act-order), all experts have their
// own rows. Matrices whose kernels need the same rows share them.
class XRows {
 public:
  XRows(Pass& pass, const Chunk& chunk);

  // The chunk's tokens [first, last) for GEMV kernels.
  void convert(int64_t first, int64_t last) const;

  // Whether any expert has its own rows; makes those of its pairs [first, last).
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
  const OrderTable* const order_;  // null if no expert has orders
  const int64_t columns_;          // of a row, the same for gate and up
  const bool shares_tokens_;       // up uses the rows of gate
  RowPointers tokens_[2];          // for gate, and for up if it needs another kind
};

}  // namespace kt
