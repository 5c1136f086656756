#include "lora.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "../pack/pack.h"
#include "../sys/need.h"

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

}  // namespace

LoraWeights::LoraWeights(std::shared_ptr<LayerState> layer, const sys::Team& team, int64_t rank)
    : layer_(std::move(layer)), rank_(rank) {
  for (int p = 0; p < team.pools(); ++p)
    parts_.push_back(make_part(true, layer_->pools[size_t(p)].size, team.node(p)));
  parts_.push_back(make_part(false, layer_->config.hidden_size, -1));
}

LoraWeights::Part LoraWeights::make_part(bool inter, int64_t columns, int node) const {
  Part part;
  for (int m = 0; m < kMatrices; ++m)
    for (int f = 0; f < kLoraFactors; ++f) {
      if (!columns || of_inter(Matrix(m), LoraFactor(f)) != inter) continue;
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

// Looks at all values first, so that nothing is overwritten where one is bad. Each pool's part is
// packed by its threads, which so touch the memory first.
class LoraPackJob : public sys::Job {
 public:
  LoraPackJob(LoraWeights& weights, const LoraSource& source, const sys::Team& team)
      : weights_(weights),
        source_(source),
        rooms_(size_t(team.threads())),
        next_(std::make_unique<std::atomic<int64_t>[]>(weights.parts_.size())) {
    const LayerConfig& c = weights_.layer_->config;
    for (int64_t slot = 0; slot < c.num_experts; ++slot)
      if (c.on_cpu[size_t(slot)]) slots_.push_back(slot);
    int64_t scratch = 0;
    for (const LoraWeights::Part& part : weights_.parts_)
      for (const auto& places : part.place)
        for (const LoraWeights::Place& place : places)
          if (place.layout.rows)
            scratch = std::max(scratch, pack_scratch(place.layout, {source.a[0], DType::kFP32}));
    const int64_t columns = std::max({c.hidden_size, c.intermediate_size, weights_.rank_});
    for (Room& room : rooms_) {
      room.rows.resize(size_t(columns * kTileRows));
      room.scratch.resize(size_t(scratch));
    }
  }

  void run(sys::Worker& w) noexcept override {
    check();
    w.team_barrier();
    if (bad_.load(std::memory_order_relaxed) != kNothing) return;
    pack_part(size_t(w.pool), rooms_[size_t(w.rank)]);
    pack_part(weights_.parts_.size() - 1, rooms_[size_t(w.rank)]);
  }

  // What is wrong, "" where nothing is.
  std::string problem() const {
    const int64_t bad = bad_.load(std::memory_order_relaxed);
    if (bad == kNothing) return "";
    const int64_t factor = bad % 2, matrix = bad / 2 % kMatrices;
    return std::string(kMatrixNames[matrix]) + "_" + kFactorNames[factor] + ", expert slot " +
           std::to_string(bad / 2 / kMatrices) +
           ": a value is NaN, infinite or beyond bfloat16; finite values are accepted";
  }

 private:
  static constexpr int64_t kNothing = INT64_MAX;
  // What a thread packs in: a tile of a transpose, and what pack_tile wants.
  struct Room {
    std::vector<float> rows, scratch;
  };
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

  // Whatever the threads, the lowest place is what is reported.
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

  void pack_part(size_t number, Room& room) {
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
                  part.memory.data() + i / kEach * part.bytes + place.at, room);
    }
  }

  // `begin`: the first row or column of the part in the source.
  void pack_matrix(Matrix m, LoraFactor f, int64_t begin, const MatrixLayout& layout, int64_t slot,
                   uint8_t* to, Room& room) const {
    const float* source = values(m, is_of_a(f), slot);
    const int64_t columns = is_of_a(f) ? in_of(m) : weights_.rank_;  // of the source
    const bool wide = f == kLoraA || f == kLoraBt;
    int64_t bad_row = 0;
    for (int64_t tile = 0; tile < layout.tiles(); ++tile) {
      uint8_t* dst = to + tile * layout.tile_bytes();
      if (!is_transposed(f)) {
        const MatrixSource from{
            {source, DType::kFP32}, columns, wide ? 0 : begin, wide ? begin : 0};
        pack_tile(layout, from, tile, room.scratch.data(), dst, &bad_row);
        continue;
      }
      const int64_t first = tile * kTileRows;
      const int64_t count = std::min(kTileRows, layout.rows - first);
      const float* corner = source + (wide ? begin * columns + first : begin + first);
      for (int64_t k = 0; k < layout.cols; ++k)
        for (int64_t n = 0; n < count; ++n)
          room.rows[size_t(n * layout.cols + k)] = corner[k * columns + n];
      const MatrixLayout one{WeightFormat::kBF16, count, layout.cols, 0};
      pack_tile(one, {{room.rows.data(), DType::kFP32}, layout.cols, 0, 0}, 0, room.scratch.data(),
                dst, &bad_row);
    }
  }

  LoraWeights& weights_;
  const LoraSource source_;
  std::vector<int64_t> slots_;                    // held
  std::vector<Room> rooms_;                       // per thread
  std::unique_ptr<std::atomic<int64_t>[]> next_;  // per part
  std::atomic<int64_t> checked_{0}, bad_{kNothing};
};

void LoraWeights::pack(sys::Team& team, const LoraSource& source) {
  const auto job = std::make_shared<LoraPackJob>(*this, source, team);
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
