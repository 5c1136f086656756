// Rows of bf16 values as the table's GEMM kernel of bf16 weights takes them: what adapters and
// transposed products are multiplied with.
#pragma once
#include <algorithm>

#include "../moe/workspace.h"
#include "kt/kernel_table.h"

namespace kt {

struct BF16Rows {
  uint8_t* data;
  int64_t columns;  // a multiple of 32
  ActKind act;
  bool blocked;

  BF16Rows(const KernelTable& table, uint8_t* memory, int64_t cols)
      : data(memory),
        columns(round_up(cols, kTileRows)),
        act(kernel(table).act),
        blocked(kernel(table).blocked) {}
  static const ProductKernel& kernel(const KernelTable& table) {
    return table.format[int(WeightFormat::kBF16)].gemm;
  }

  // The rows from `first` on, which begins a block.
  ActRows from(int64_t first) const {
    return {data + first * columns * act_bytes(act),
            columns * act_bytes(act),
            nullptr,
            nullptr,
            0,
            0,
            nullptr};
  }

  // Where columns [32 * tile, 32 * tile + 32) of a row lie.
  uint8_t* at(int64_t row, int64_t tile) const {
    const int64_t stride = columns * act_bytes(act), bytes = kTileRows * act_bytes(act);
    return blocked ? blocked_row(data, stride, row) + tile * kBlockRows * kChunkBytes
                   : data + row * stride + tile * bytes;
  }
  // Writes them: `valid` values, then zeros.
  void put(const KernelTable& table, int64_t row, int64_t tile, const void* values, DType dtype,
           int64_t valid) const {
    table.quantise[int(act)](values, dtype, valid, kTileRows, -1, at(row, tile), nullptr, nullptr);
  }

  // The same of m rows from `first` on, which begins a block: tiles of values in float32.
  void put_tile(const KernelTable& table, int64_t first, int64_t tile, const float* values,
                int64_t m, int64_t valid) const {
    // All rows of a block lie next to each other.
    const int64_t each = blocked && valid == kTileRows ? kBlockRows : 1;
    for (int64_t r = 0; r < m; r += each) {
      const int64_t n = std::min(each, m - r) * (each > 1 ? kTileRows : valid);
      uint8_t* dst = at(first + r, tile);
      table.quantise[int(act)](values + r * kTileRows, DType::kFP32, n, round_up(n, kTileRows), -1,
                               dst, nullptr, nullptr);
    }
  }

  // A whole row of n values.
  void put_row(const KernelTable& table, int64_t row, const void* values, DType dtype,
               int64_t n) const {
    if (!blocked) {
      table.quantise[int(act)](values, dtype, n, columns, -1, data + row * columns * act_bytes(act),
                               nullptr, nullptr);
      return;
    }
    if (act == ActKind::kBF16 && dtype == DType::kBF16 && n == columns)  // as they are
      return copy_to_blocks(static_cast<const uint8_t*>(values), columns * act_bytes(act), data,
                            row);
    for (int64_t i = 0; i < columns; i += kTileRows)
      put(table, row, i / kTileRows, static_cast<const uint8_t*>(values) + i * dtype_bytes(dtype),
          dtype, std::clamp<int64_t>(n - i, 0, kTileRows));
  }
};

// A tile of values has room for the rows of one kernel call.
constexpr int64_t kValuesPerTile = (kRowBlock + kRowSlack) * kTileRows;

}  // namespace kt
