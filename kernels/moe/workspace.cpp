#include "workspace.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace kt {
namespace {

constexpr int64_t kMaxActBytes = 4;   // float32 holding bf16 values
constexpr int64_t kMinGroup = 32;     // scales per row: at most one per 32 columns
constexpr int64_t kMaxPadding = 128;  // of columns, for any layout

size_t row_bytes(int64_t rows, int64_t cols) {
  return size_t((rows + kRowSlack) * (cols + kMaxPadding) * kMaxActBytes);
}
size_t scale_bytes(int64_t rows, int64_t cols) {
  return size_t((rows + kRowSlack) * (cols / kMinGroup + 1) * 4);
}

}  // namespace

// Mappings cost nothing until written, so every buffer gets the size of its largest use.
Workspace::Workspace(const WorkspaceSize& s, int pools, int threads) : size(s) {
  // Tile experts have whole blocks, and one may start after a vector expert.
  const int64_t pairs = s.max_tokens * s.top_k + 2 * s.experts * (kBlockRows - 1);
  x = sys::Mapping(row_bytes(s.max_tokens, s.hidden));
  x_scale = sys::Mapping(scale_bytes(s.max_tokens, s.hidden));
  x_sum = sys::Mapping(scale_bytes(s.max_tokens, s.hidden));
  gathered = sys::Mapping(row_bytes(pairs, s.hidden));
  gathered_scale = sys::Mapping(scale_bytes(pairs, s.hidden));
  gathered_sum = sys::Mapping(scale_bytes(pairs, s.hidden));
  h_float = sys::Mapping(row_bytes(pairs, s.intermediate));
  for (int p = 0; p < pools; ++p) {
    h.emplace_back(row_bytes(pairs, s.intermediate));
    h_scale.emplace_back(scale_bytes(pairs, s.intermediate));
    h_sum.emplace_back(scale_bytes(pairs, s.intermediate));
    sum.emplace_back(size_t(round_up(s.hidden, kTileRows) * s.max_tokens) * 4);
  }
  rows = sys::Mapping(size_t(threads) * row_bytes(0, s.intermediate) / kRowSlack);
  scratch = sys::Mapping(size_t(threads * 2 * (kRowBlock + kRowSlack) * kTileRows) * 4);
}

uint8_t* Workspace::thread_row(int rank) const {
  return this->rows.data() + size_t(rank) * row_bytes(0, size.intermediate) / kRowSlack;
}

void copy_to_blocks(const uint8_t* src, int64_t stride, uint8_t* rows, int64_t row) {
  uint8_t* dst = blocked_row(rows, stride, row);
  for (int64_t i = 0; i < stride; i += kChunkBytes, dst += kBlockRows * kChunkBytes)
    std::memcpy(dst, src + i, kChunkBytes);
}

float* Workspace::thread_scratch(int rank) const {
  return reinterpret_cast<float*>(scratch.data()) + rank * 2 * (kRowBlock + kRowSlack) * kTileRows;
}

std::shared_ptr<Workspace> workspace_for(const std::shared_ptr<sys::Team>& team,
                                         WorkspaceSize size) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<sys::Team>, std::weak_ptr<Workspace>,
                  std::owner_less<std::weak_ptr<sys::Team>>>
      known;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.first.expired(); });
  auto& entry = known[team];
  if (auto present = entry.lock()) {
    if (size <= present->size) return present;
    size.max_tokens = std::max(size.max_tokens, present->size.max_tokens);
    size.top_k = std::max(size.top_k, present->size.top_k);
    size.experts = std::max(size.experts, present->size.experts);
    size.hidden = std::max(size.hidden, present->size.hidden);
    size.intermediate = std::max(size.intermediate, present->size.intermediate);
  }
  auto fresh = std::make_shared<Workspace>(size, team->pools(), team->threads());
  entry = fresh;
  return fresh;
}

}  // namespace kt
