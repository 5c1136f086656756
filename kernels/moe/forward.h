// The forward pass of a layer as a job of its team.
#pragma once
#include <memory>

#include "layer.h"
#include "plan.h"

namespace kt {

// Steps, each shared among the threads, with a barrier between them:
//   1. tokens: x rows to A rows; thread 0 makes the plan (tokens -> experts)
//   2. gather: A rows of the experts that go to a GEMM kernel, where it wants others than the GEMV
//   3. gate, up, activation: tiles of all experts, split by cost; h to A rows
//   4. activations with one scale per row: h rows to A rows once the whole row is there
//   5. down and the weighted sum: a thread owns output tiles over all experts, in registers and
//      its own columns of the sum, so there are no atomics and one order of additions
//   6. sum over pools, addition of what the layer before deferred, one rounding
class ForwardJob : public sys::Job {
 public:
  ForwardJob(std::shared_ptr<LayerState> layer, const ForwardArgs& args);
  void run(sys::Worker& worker) noexcept override;

 private:
  struct Chunk {  // the tokens of one round
    int64_t first, count;
  };

  void tokens(const sys::Worker& w, const Chunk& c);
  void gather(const sys::Worker& w, const Chunk& c);
  void gate_up(const sys::Worker& w);
  void quantise_hidden(const sys::Worker& w);
  void down(const sys::Worker& w, const Chunk& c);
  void finish(const sys::Worker& w, const Chunk& c);

  int64_t gemm_min_rows() const;
  const ProductKernel& kernel(const ExpertRows& e) const {
    return e.gemm ? kernels_.gemm : kernels_.gemv;
  }
  // Whether experts with many rows need A rows of their own, apart from x.
  bool gathers() const {
    return kernels_.gemm.blocked || kernels_.gemm.act != kernels_.gemv.act;
  }
  const uint8_t* source_row(int64_t token) const;
  ActRows x_of_tokens() const;
  ActRows x_rows(const ExpertRows& e) const;
  ActRows h_rows(int pool, const ExpertRows& e) const;
  ActRows rows_of(const sys::Mapping& data, const sys::Mapping& scale, const sys::Mapping& sum,
                  int64_t columns, const ExpertRows& e) const;
  void h_tile(const ActRows& a, const ProductKernel& down, const float* values, int64_t row,
              int64_t tile, int64_t valid) const;
  void quantise(ActKind act, const void* src, DType dtype, int64_t k, int64_t padded, float absmax,
                const ActRows& to, int64_t row) const;

  const std::shared_ptr<LayerState> layer_;
  const LayerConfig& config_;
  const Workspace& work_;
  const FormatKernels& kernels_;
  const ForwardArgs args_;
  Plan plan_;
};

}  // namespace kt
