#include "packed.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../pack/packed.h"

namespace kt {

PackedLoad::PackedLoad(std::shared_ptr<LayerState> layer, int64_t slot,
                       const ByMatrix<const uint8_t*>& tiles, const ByMatrix<const float*>& bias,
                       int threads)
    : layer_(std::move(layer)),
      slot_(slot),
      tiles_(tiles),
      bias_(bias),
      findings_(size_t(threads)) {}

void PackedLoad::run(sys::Worker& w) noexcept {
  const PoolPart& part = layer_->pools[size_t(w.pool)];
  const int64_t all = part.tiles();
  Finding& found = findings_[size_t(w.rank)];
  for (int64_t i = all * w.index / w.pool_threads; i < all * (w.index + 1) / w.pool_threads; ++i) {
    const PoolPart::Tile t = part.tile(i);
    const MatrixLayout whole = layer_->config.layout(t.matrix);
    const bool down = t.matrix == kDown;
    const int64_t number = down ? t.number : part.begin / kTileRows + t.number;
    const PackedColumns from(whole, tiles_[t.matrix] + number * whole.tile_bytes(),
                             down ? part.begin : 0, part.layout[t.matrix]);
    int64_t lane = 0;
    found.error = take_columns(from, layer_->expert(w.pool, slot_) + t.at, &lane);
    found.matrix = t.matrix;
    found.row = number * kTileRows + lane;
    if (found.error != PackError::kNone) return;
  }
  if (w.rank == 0) layer_->keep_rest(slot_, bias_, {});
}

PackedSave::PackedSave(std::shared_ptr<LayerState> layer, int64_t slot, Matrix m, uint8_t* dst)
    : layer_(std::move(layer)), slot_(slot), matrix_(m), dst_(dst) {}

void PackedSave::run(sys::Worker& w) noexcept {
  const MatrixLayout whole = layer_->config.layout(matrix_);
  const bool down = matrix_ == kDown;
  const int64_t all = whole.tiles();
  for (int64_t tile = all * w.rank / w.team_threads; tile < all * (w.rank + 1) / w.team_threads;
       ++tile) {
    uint8_t* dst = dst_ + tile * whole.tile_bytes();
    std::memset(dst, 0, size_t(whole.head_bytes()));
    for (int p = 0; p < int(layer_->pools.size()); ++p) {
      const PoolPart& part = layer_->pools[size_t(p)];
      const int64_t number = down ? tile : tile - part.begin / kTileRows;
      if (!part.size || number < 0 || number >= part.layout[matrix_].tiles()) continue;
      const uint8_t* src = layer_->expert(p, slot_) + part.begin_of(matrix_);
      put_columns(part.layout[matrix_], src + number * part.stride_of(matrix_), whole,
                  down ? part.begin : 0, dst);
    }
  }
}

}  // namespace kt
