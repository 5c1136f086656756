// The experts of one MoE layer that the CPU computes: loading them, and their forward pass.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../sys/team.h"
#include "config.h"

namespace kt {

struct LayerState;

class MoeLayer {
 public:
  // Throws std::invalid_argument for a configuration that no kernel supports.
  MoeLayer(std::shared_ptr<sys::Team> team, LayerConfig config);

  // Packs experts with all threads of the team, and blocks. Passing several small experts at once
  // keeps the threads busier. A slot loaded twice keeps the later weights. Throws
  // std::invalid_argument if a slot is named twice or not held here, or if a weight cannot be
  // represented. Slots loaded before then keep their weights, and the others still count as not
  // loaded.
  void load(const std::vector<SlotSource>& experts);

  // Loads packed tiles as save_packed writes them, at any address; null for a gate that the experts
  // do not have. Throws std::invalid_argument for
  // a code or scale that packing would not have made; the slot must then be loaded again.
  void load_packed(int64_t slot, const ByMatrix<const uint8_t*>& tiles,
                   const ByMatrix<const float*>& bias);

  // Writes the packed tiles of a whole matrix of a slot, [tiles, tile_bytes] of its layout. The
  // bytes do not depend on the pools. Throws std::invalid_argument for a slot with column orders,
  // which packed tiles do not hold.
  void save_packed(int64_t slot, int matrix, uint8_t* dst) const;

  // Sets which slots passes compute, [num_experts], 1 for those; the routes of others are skipped.
  // Waits for the passes submitted before, which still compute the old slots. Deferred experts of a
  // stream belong to their pass, so the stream must be drained first. The weights stay, so a slot
  // that was switched off can be switched on again. Throws std::invalid_argument for a slot that is
  // not loaded; nothing changes then.
  void set_on_cpu(std::vector<uint8_t> on_cpu);

  // Queues a forward pass and returns at once. All experts held must have been loaded.
  std::shared_ptr<sys::Job> submit(const ForwardArgs& args);

  // Writes dequantised weights, with columns in the matrix's own order. matrix: 0 gate, 1 up [I,
  // H], 2 down [H, I].
  void unpack(int64_t slot, int matrix, float* dst) const;

  const LayerConfig& config() const;
  // For jobs on this layer that other code creates.
  sys::Team& team() const { return *team_; }
  const std::shared_ptr<sys::Team>& shared_team() const { return team_; }
  const std::shared_ptr<LayerState>& state() const { return state_; }
  int64_t packed_bytes() const;

 private:
  void need_slot(int64_t slot) const;

  std::shared_ptr<sys::Team> team_;
  std::shared_ptr<LayerState> state_;
};

}  // namespace kt
