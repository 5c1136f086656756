// Where the A rows of a forward pass lie in the workspace, and their conversion.
#pragma once
#include "layer.h"
#include "plan.h"

namespace kt {

struct ActRowBuffers {
  const LayerState& layer;
  const Workspace& work;
  const FormatKernels& kernels;

  const ProductKernel& kernel(const ExpertRows& e) const {
    return e.gemm ? kernels.gemm : kernels.gemv;
  }
  // Whether experts with many rows need A rows of their own, apart from x.
  bool gathers() const { return kernels.gemm.blocked || kernels.gemm.act != kernels.gemv.act; }
  int64_t x_columns() const { return layer.pools[0].up.cols_padded(); }
  const void* source_row(const ForwardArgs& args, int64_t token) const {
    return static_cast<const uint8_t*>(args.x) +
           token * layer.config.hidden_size * dtype_bytes(args.dtype);
  }
  ActRows x_of_tokens() const;                        // of the chunk, for GEMV kernels
  ActRows x_of_tokens(const ThreadSpace& own) const;  // the same, where every thread has its own
  ActRows gathered(const ExpertRows& e) const;
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
  ActRows rows_of(const sys::Mapping& data, const sys::Mapping& scale, const sys::Mapping& sum,
                  int64_t columns, const ExpertRows& e) const;
};

template <class T> T* as(const sys::Mapping& m) { return reinterpret_cast<T*>(m.data()); }

inline float* ActRowBuffers::h_float(int64_t row) const {
  return as<float>(work.h_float) + row * h_float_stride();
}

}  // namespace kt
