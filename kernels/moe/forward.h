// The forward pass of a layer as a job of its team.
#pragma once
#include <memory>

#include "layer.h"
#include "plan.h"

namespace kt {

// Steps, each shared among the threads, with a barrier between them:
//   1. tokens: x rows to A rows; thread 0 makes the plan (tokens -> experts)
//   2. gather: A rows of the experts that go to a tile kernel, in blocks
//   3. gate, up, activation: tiles of all experts, split by cost
//   4. integer formats: h rows to A rows
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
  struct RowShape {  // of A rows: padded columns, scales, bytes
    int64_t columns, groups, stride;
  };

  void tokens(const sys::Worker& w, const Chunk& c);
  void gather(const sys::Worker& w);
  void gate_up(const sys::Worker& w);
  void quantise_hidden(const sys::Worker& w);
  void down(const sys::Worker& w, const Chunk& c);
  void finish(const sys::Worker& w, const Chunk& c);

  int64_t tile_min_rows() const;
  RowShape shape_of(const MatrixLayout& layout) const;
  ActRows x_rows(const ExpertRows& e) const;
  ActRows h_rows(int pool, int64_t row) const;

  const std::shared_ptr<LayerState> layer_;
  const LayerConfig& config_;
  const Workspace& work_;
  const FormatKernels& kernels_;
  const ForwardArgs args_;
  const RowShape x_shape_;
  Plan plan_;
};

}  // namespace kt
