#include "lora.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "../sys/need.h"
#include "kt/training.h"

namespace kt {
namespace {

constexpr const char* kFactorNames[2] = {"lora_a", "lora_b"};

bool is_transposed(LoraFactor f) { return f == kLoraAt || f == kLoraBt; }
bool is_of_a(LoraFactor f) { return f == kLoraA || f == kLoraAt; }

// Whether all values stay finite when they are rounded to bf16.
bool all_finite(const float* values, int64_t n) {
  bool good = true;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    good &= (bits & 0x7fffffff) < 0x7f7f8000;
  }
  return good;
}

// To bf16, to nearest even, in the low half; x is finite.
uint32_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Packs a tile of bf16 weights (kt/format.h) of `rows` rows, whose values lie `to_row` and
// `to_column` apart. The padding is left as it is.
void pack_values(const MatrixLayout& layout, const float* values, int64_t rows, int64_t to_row,
                 int64_t to_column, uint8_t* tile) {
  for (int64_t k = 0; k < layout.cols; k += 2, tile += kStepBytes) {
    const float* pair = values + k * to_column;
    const int64_t second = k + 1 < layout.cols ? to_column : 0;
    for (int64_t n = 0; n < rows; ++n, pair += to_row) {
      const uint32_t low = bf16_bits(pair[0]), high = second ? bf16_bits(pair[second]) : 0;
      const uint32_t lane = high << 16 | low;
      std::memcpy(tile + n * 4, &lane, 4);
    }
  }
}

}  // namespace

LoraWeights::LoraWeights(std::shared_ptr<LayerState> layer, const sys::Team& team, int64_t rank)
    : layer_(std::move(layer)), rank_(rank) {
  for (int p = 0; p < team.pools(); ++p)
    parts_.push_back(make_part(true, layer_->pools[size_t(p)].size, team.node(p)));
  parts_.push_back(make_part(false, layer_->config.hidden_size, -1));
}

LoraWeights::Part LoraWeights::make_part(bool inter, int64_t columns, int node) const {
  Part part;
  // Products with a transpose are then transposed products with the factor itself.
  const bool turns = layer_->config.table->training->turned;
  for (int m = 0; m < kMatrices; ++m)
    for (int f = 0; f < kLoraFactors; ++f) {
      if (!columns || of_inter(Matrix(m), LoraFactor(f)) != inter) continue;
      if (is_transposed(LoraFactor(f)) && turns) continue;
      // A and Bt have a row for each number of the rank.
      const bool wide = f == kLoraA || f == kLoraBt;
      Place& place = part.place[size_t(m)][size_t(f)];
      place = {{WeightFormat::kBF16, wide ? rank_ : columns, wide ? columns : rank_, 0},
               part.bytes};
      part.bytes += place.layout.bytes();
    }
  part.memory = sys::Mapping(size_t(layer_->held * part.bytes), node);
  return part;
}

// Checks all values before it overwrites any. The threads of a pool pack the pool's part, so that
// they touch its memory first.
class LoraPackJob : public sys::Job {
 public:
  LoraPackJob(LoraWeights& weights, const LoraSource& source)
      : weights_(weights),
        source_(source),
        next_(std::make_unique<std::atomic<int64_t>[]>(weights.parts_.size())) {
    const LayerConfig& c = weights_.layer_->config;
    for (int64_t slot = 0; slot < c.num_experts; ++slot)
      if (c.on_cpu[size_t(slot)]) slots_.push_back(slot);
  }

  void run(sys::Worker& w) noexcept override {
    check();
    w.team_barrier();
    if (bad_.load(std::memory_order_relaxed) != kNothing) return;
    pack_part(size_t(w.pool));
    pack_part(weights_.parts_.size() - 1);
  }

  // The error message; "" if all values are good.
  std::string problem() const {
    const int64_t bad = bad_.load(std::memory_order_relaxed);
    if (bad == kNothing) return "";
    const int64_t factor = bad % 2, matrix = bad / 2 % kMatrices;
    return std::string(kMatrixNames[matrix]) + "_" + kFactorNames[factor] + " of expert slot " +
           std::to_string(bad / 2 / kMatrices) +
           " has a value that is NaN, infinite or too large for bfloat16; accepted: finite values";
  }

 private:
  static constexpr int64_t kNothing = INT64_MAX;
  int64_t in_of(Matrix m) const {
    const LayerConfig& c = weights_.layer_->config;
    return m == kDown ? c.intermediate_size : c.hidden_size;
  }
  int64_t out_of(Matrix m) const {
    const LayerConfig& c = weights_.layer_->config;
    return m == kDown ? c.hidden_size : c.intermediate_size;
  }
  const float* values(Matrix m, bool of_a, int64_t slot) const {
    const int64_t size = weights_.rank_ * (of_a ? in_of(m) : out_of(m));
    return (of_a ? source_.a[m] : source_.b[m]) + slot * size;
  }

  // Reports the lowest bad place, however the threads share the work.
  void check() {
    for (int64_t i; (i = checked_.fetch_add(1, std::memory_order_relaxed)) <
                    int64_t(slots_.size()) * kMatrices * 2;) {
      const int64_t slot = slots_[size_t(i / 2 / kMatrices)];
      const auto m = Matrix(i / 2 % kMatrices);
      const bool of_a = i % 2 == 0;
      if (all_finite(values(m, of_a, slot), weights_.rank_ * (of_a ? in_of(m) : out_of(m))))
        continue;
      const int64_t place = (slot * kMatrices + m) * 2 + i % 2;
      int64_t lowest = bad_.load(std::memory_order_relaxed);
      while (place < lowest &&
             !bad_.compare_exchange_weak(lowest, place, std::memory_order_relaxed)) {
      }
    }
  }

  void pack_part(size_t number) {
    LoraWeights::Part& part = weights_.parts_[number];
    constexpr int64_t kEach = kMatrices * kLoraFactors;
    const bool inter = number + 1 < weights_.parts_.size();
    const int64_t begin = inter ? weights_.layer_->pools[number].begin : 0;
    for (int64_t i; (i = next_[number].fetch_add(1, std::memory_order_relaxed)) <
                    int64_t(slots_.size()) * kEach;) {
      const auto m = Matrix(i % kEach / kLoraFactors);
      const auto f = LoraFactor(i % kLoraFactors);
      const LoraWeights::Place& place = part.place[size_t(m)][size_t(f)];
      if (!place.layout.rows) continue;
      pack_matrix(m, f, begin, place.layout, slots_[size_t(i / kEach)],
                  part.memory.data() + i / kEach * part.bytes + place.at);
    }
  }

  // `begin`: the first row or column of the part in the source.
  void pack_matrix(Matrix m, LoraFactor f, int64_t begin, const MatrixLayout& layout, int64_t slot,
                   uint8_t* to) const {
    const int64_t columns = is_of_a(f) ? in_of(m) : weights_.rank_;  // of the source
    const bool turned = is_transposed(f);
    // A and its transpose begin at a column of the source, B and its transpose at a row.
    const float* source = values(m, is_of_a(f), slot) + begin * (is_of_a(f) ? 1 : columns);
    const int64_t to_row = turned ? 1 : columns, to_column = turned ? columns : 1;
    for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
      const int64_t first = tile * kTileRows, count = std::min(kTileRows, layout.rows - first);
      pack_values(layout, source + first * to_row, count, to_row, to_column,
                  to + tile * layout.tile_bytes());
    }
  }

  LoraWeights& weights_;
  const LoraSource source_;
  std::vector<int64_t> slots_;                    // held
  std::unique_ptr<std::atomic<int64_t>[]> next_;  // per part
  std::atomic<int64_t> checked_{0}, bad_{kNothing};
};

void LoraWeights::pack(sys::Team& team, const LoraSource& source) {
  const auto job = std::make_shared<LoraPackJob>(*this, source);
  const bool before = std::exchange(packed_, false);  // a child forked meanwhile has a mixture
  try {
    team.submit(job);
  } catch (...) {
    packed_ = before;
    throw;
  }
  job->wait();
  const std::string problem = job->problem();
  packed_ = before || problem.empty();
  need(problem.empty(), problem);
}

}  // namespace kt
