// Where the A rows of a forward pass lie in the workspace, and their conversion.
#pragma once
#include <algorithm>

#include "state.h"

namespace kt {

// Matrices whose kernels want the same A rows share them. `m` is gate or up in all that follows.
struct ActRowBuffers {
  const LayerState& layer;
  const Workspace& work;
  ByMatrix<FormatKernels> kernels;  // copies: next to each other

  const ProductKernel& kernel(const ExpertRows& e, Matrix m) const {
    return e.gemm[m] ? kernels[m].gemm : kernels[m].gemv;
  }
  // Whether GEMM kernels need A rows of the expert's own, apart from x.
  bool gemm_gathers(Matrix m) const {
    return kernels[m].gemm.blocked || kernels[m].gemm.act != kernels[m].gemv.act;
  }
  // Whether the expert has such rows: also where its columns have an order of their own.
  bool gathers(const ExpertRows& e, Matrix m) const {
    return layer.order.any || (e.gemm[m] && gemm_gathers(m));
  }
  // Whether up has no x rows of its own: of the tokens, and of an expert.
  bool shares_tokens() const { return kernels[kGate].gemv.act == kernels[kUp].gemv.act; }
  bool shares_gathered(const ExpertRows& e) const {
    const ProductKernel &gate = kernel(e, kGate), &up = kernel(e, kUp);
    return gathers(e, kGate) && gate.act == up.act && gate.blocked == up.blocked &&
           layer.order.same[size_t(layer.position[size_t(e.slot)])];
  }
  // Of an A row of x, whichever of the two it is for.
  int64_t x_columns() const {
    const auto& layout = layer.pools[0].layout;
    return std::max(layout[kGate].cols_padded(), layout[kUp].cols_padded());
  }
  const void* source_row(const ForwardArgs& args, int64_t token) const {
    return static_cast<const uint8_t*>(args.x) +
           token * layer.config.hidden_size * dtype_bytes(args.dtype);
  }
  ActRows x_of_tokens(Matrix m) const;  // of the chunk, for GEMV kernels
  // The same, where every thread has its own.
  ActRows x_of_tokens(Matrix m, const ThreadSpace& own) const;
  ActRows gathered(const ExpertRows& e, Matrix m) const;
  ActRows h(int pool, const ExpertRows& e) const;
  // Whole rows of h in float32, of all pools: row `row` of the buffer.
  float* h_float(int64_t row) const;
  int64_t h_float_stride() const { return round_up(layer.config.intermediate_size, kTileRows); }
  // int8 rows of h with one scale each.
  ActRows own_h(int pool, const ThreadSpace& own) const;

  void quantise(ActKind act, const void* src, DType dtype, int64_t k, int64_t padded, float absmax,
                const ActRows& to, int64_t row) const;
  // 32 columns of h as part of their A row: `valid` values, then zeros.
  void quantise_tile(const ActRows& a, const ProductKernel& down, const float* values, int64_t row,
                     int64_t tile, int64_t valid) const;
  // A pool's part of a row of h, of all I columns as float32, by way of a contiguous row.
  void quantise_whole_row(int pool, const ProductKernel& down, const float* values,
                          const ActRows& to, int64_t row, uint8_t* contiguous) const;

 private:
  int x_buffer(Matrix m) const { return m == kUp && !shares_tokens(); }
  ActRows rows_of(const ActBuffer& buffer, int64_t columns, const ExpertRows& e, Matrix m) const;
};

template <class T> T* as(const sys::Mapping& m) { return reinterpret_cast<T*>(m.data()); }

inline float* ActRowBuffers::h_float(int64_t row) const {
  return as<float>(work.h_float) + row * h_float_stride();
}

}  // namespace kt
