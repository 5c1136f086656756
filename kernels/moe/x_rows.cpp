#include "x_rows.h"

#include <algorithm>

namespace kt {

XRows::XRows(Pass& pass, const Chunk& chunk)
    : pass_(pass),
      chunk_(chunk),
      order_(pass.layer.order.any ? &pass.layer.order : nullptr),
      columns_(std::max(pass.layer.pools[0].layout[kGate].cols_padded(),
                        pass.layer.pools[0].layout[kUp].cols_padded())),
      shares_tokens_(pass.kernels[kGate].gemv.act == pass.kernels[kUp].gemv.act) {
  for (int i = 0; i < 2; ++i) tokens_[i] = chunk.own ? pass.space.x[i] : pass.work.x[i].pointers();
}

bool XRows::gemm_gathers(Matrix m) const {
  const FormatKernels& kernels = pass_.kernels[m];
  return kernels.gemm.blocked || kernels.gemm.act != kernels.gemv.act;
}

bool XRows::gathers(const Plan& plan) const {
  const auto any = [&](Matrix m) { return plan.any_gemm(m) && gemm_gathers(m); };
  return order_ || any(kGate) || any(kUp);
}

// Whether up shares gate's gathered rows.
bool XRows::shares_gathered(const ExpertRows& e) const {
  const ProductKernel &gate = pass_.kernel(e, kGate), &up = pass_.kernel(e, kUp);
  return gathers(e, kGate) && gate.act == up.act && gate.blocked == up.blocked &&
         (!order_ || order_->same[size_t(pass_.layer.position[size_t(e.slot)])]);
}

ActRows XRows::of_tokens(Matrix m) const {
  return act_rows(pass_.kernels[m].gemv.act, columns_, tokens_[m == kUp && !shares_tokens_]);
}

ActRows XRows::gathered(const ExpertRows& e, Matrix m) const {
  if (m == kUp && shares_gathered(e)) m = kGate;
  return act_rows(pass_.kernels[m], e.gemm[m], columns_, pass_.work.gathered[m], e.row);
}

ActRows XRows::rows(const Plan& plan, const ExpertRows& e, Matrix m) const {
  if (gathers(e, m)) return gathered(e, m);
  ActRows x = of_tokens(m);
  x.index = plan.tokens() + e.first;
  return x;
}

const void* XRows::source(int64_t token) const {
  const ForwardArgs& args = chunk_.args;
  return static_cast<const uint8_t*>(args.x) +
         (chunk_.first + token) * pass_.layer.config.hidden_size * dtype_bytes(args.dtype);
}

void XRows::quantise(ActKind act, const void* src, const ActRows& to, int64_t row) const {
  const LayerConfig& c = pass_.layer.config;
  quantise_row(*c.table, act, src, chunk_.args.dtype, c.hidden_size, columns_, -1, to, row);
}

void XRows::convert(int64_t first, int64_t last) const {
  if (order_) return;  // all rows are gathered
  const ActRows gate = of_tokens(kGate), up = of_tokens(kUp);
  for (int64_t t = first; t < last; ++t) {
    quantise(pass_.kernels[kGate].gemv.act, source(t), gate, t);
    if (!shares_tokens_) quantise(pass_.kernels[kUp].gemv.act, source(t), up, t);
  }
}

void XRows::gather(const Plan& plan, const ExpertRows& e, int64_t first, int64_t last) const {
  const bool gate = gathers(e, kGate), up = gathers(e, kUp) && !shares_gathered(e);
  for (int64_t pair = first; (gate || up) && pair < last; ++pair) {
    if (gate) gather_row(e, kGate, plan.tokens()[pair], pair - e.first);
    if (up) gather_row(e, kUp, plan.tokens()[pair], pair - e.first);
  }
}

void XRows::gather_row(const ExpertRows& e, Matrix m, int64_t token, int64_t row) const {
  const ProductKernel& kernel = pass_.kernel(e, m);
  const ActRows to = gathered(e, m);
  const void* x = source(token);
  if (order_) x = in_order(e, m, x);
  if (!kernel.blocked) return quantise(kernel.act, x, to, row);
  ActRows one = to.from(row);  // converted to a contiguous row first
  one.data = pass_.space.row;
  if (!order_ && kernel.act == pass_.kernels[m].gemv.act) {
    const ActRows there = of_tokens(m).from(token);
    one.data = there.data;
    std::copy_n(there.scale, there.scales, const_cast<float*>(one.scale));
    std::copy_n(there.sum, there.sums, const_cast<int32_t*>(one.sum));
  } else {
    quantise(kernel.act, x, one, 0);
  }
  copy_to_blocks(one.data, to.stride, const_cast<uint8_t*>(to.data), row);
}

// A row of x with its columns in the order of the expert's matrix.
const void* XRows::in_order(const ExpertRows& e, Matrix m, const void* row) const {
  const int32_t* order = order_->row(pass_.layer.position[size_t(e.slot)], m);
  const auto permute = [&]<class T>(const T* from) {
    auto* to = reinterpret_cast<T*>(pass_.space.ordered);
    for (int64_t k = 0; k < order_->width; ++k) to[k] = from[order[k]];
  };
  if (chunk_.args.dtype == DType::kFP32)
    permute(static_cast<const uint32_t*>(row));
  else
    permute(static_cast<const uint16_t*>(row));
  return pass_.space.ordered;
}

}  // namespace kt
