#include "act_rows.h"

#include <algorithm>
#include <cstring>

namespace kt {

RowPointers ActBuffer::pointers() const {
  return {data.data(), as<float>(scale), as<int32_t>(sum)};
}

ActRows act_rows(ActKind act, int64_t columns, const RowPointers& at) {
  return {at.data, columns * act_bytes(act), at.scale,
          at.sum,  act_scales(act, columns), act_sums(act, columns),
          nullptr};
}

ActRows act_rows(const FormatKernels& kernels, bool gemm, int64_t columns, const ActBuffer& buffer,
                 int64_t row) {
  const ActKind a = kernels.gemv.act, b = kernels.gemm.act;
  RowPointers at = buffer.pointers();
  at.data += row * columns * std::max(act_bytes(a), act_bytes(b));
  at.scale += row * std::max(act_scales(a, columns), act_scales(b, columns));
  at.sum += row * std::max(act_sums(a, columns), act_sums(b, columns));
  return act_rows(gemm ? b : a, columns, at);
}

void quantise_row(const KernelTable& table, ActKind act, const void* src, DType dtype, int64_t k,
                  int64_t padded, float absmax, const ActRows& to, int64_t row) {
  table.quantise[int(act)](
      src, dtype, k, padded, absmax, const_cast<uint8_t*>(to.data) + row * to.stride,
      const_cast<float*>(to.scale) + row * to.scales, const_cast<int32_t*>(to.sum) + row * to.sums);
}

void copy_to_blocks(const uint8_t* src, int64_t stride, uint8_t* rows, int64_t row) {
  uint8_t* dst = blocked_row(rows, stride, row);
  for (int64_t i = 0; i < stride; i += kChunkBytes, dst += kBlockRows * kChunkBytes)
    std::memcpy(dst, src + i, kChunkBytes);
}

}  // namespace kt
