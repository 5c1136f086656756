// The packed adapters of a layer's experts, in the forms that products with them want: A, B and
// their transposes, which exist only where the table has no turned kernels.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../moe/state.h"
#include "../sys/numa_memory.h"
#include "../sys/team.h"

namespace kt {

constexpr int64_t kMaxRank = 4096;

// y = x W^T + scaling * x A^T B^T: A [rank, in], B [out, rank], and their transposes.
enum LoraFactor : int { kLoraA = 0, kLoraB = 1, kLoraAt = 2, kLoraBt = 3 };
constexpr int kLoraFactors = 4;

// Of all experts of a layer, float32 in row-major order: A [E, rank, in], B [E, out, rank].
struct LoraSource {
  ByMatrix<const float*> a, b;
};

// Every factor is a matrix of bf16 weights. Factors with a dimension of I are split among the pools
// in the same way as the layer's weights. The other factors exist once.
class LoraWeights {
 public:
  LoraWeights(std::shared_ptr<LayerState> layer, const sys::Team& team, int64_t rank);

  int64_t rank() const { return rank_; }
  int64_t rank_padded() const { return round_up(rank_, kTileRows); }
  // `pool` is ignored for a factor without I.
  const MatrixLayout& layout(Matrix m, LoraFactor f, int pool) const {
    return parts_[part_of(m, f, pool)].place[m][f].layout;
  }
  const uint8_t* tiles(Matrix m, LoraFactor f, int pool, int64_t slot) const {
    const Part& part = parts_[part_of(m, f, pool)];
    return part.memory.data() + layer_->position[size_t(slot)] * part.bytes + part.place[m][f].at;
  }
  bool packed() const { return packed_; }

  // Packs the adapters of the experts held, with all threads of the team. Blocks. If a value is not
  // finite in bf16, throws std::invalid_argument, which names the matrix and the expert, and leaves
  // the adapters as they were.
  void pack(sys::Team& team, const LoraSource& source);

 private:
  friend class LoraPackJob;
  struct Place {
    MatrixLayout layout{};  // of no rows where the part does not have it
    int64_t at = 0;         // in an expert's bytes
  };
  struct Part {
    ByMatrix<std::array<Place, kLoraFactors>> place;
    int64_t bytes = 0;  // of an expert
    sys::Mapping memory;
  };
  // Whether the dimension other than the rank is I.
  static bool of_inter(Matrix m, LoraFactor f) {
    return (m == kDown) == (f == kLoraA || f == kLoraAt);
  }
  // One part for each pool, then the part of all pools.
  size_t part_of(Matrix m, LoraFactor f, int pool) const {
    return of_inter(m, f) ? size_t(pool) : parts_.size() - 1;
  }
  Part make_part(bool inter, int64_t columns, int node) const;

  std::shared_ptr<LayerState> layer_;
  int64_t rank_;
  std::vector<Part> parts_;
  bool packed_ = false;
};

}  // namespace kt
