#include "product_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "../moe/form.h"
#include "../moe/workspace.h"
#include "../sys/need.h"

namespace kt {

using Clock = std::chrono::steady_clock;

namespace {

int64_t checked_bytes(int64_t bytes) {
  need_in_range("bytes", bytes, 1, int64_t{1} << 44);
  return bytes;
}

}  // namespace

class ProductBench::Fill : public sys::Job {
 public:
  Fill(ProductBench& bench, const uint8_t* tiles) : bench_(bench), tiles_(tiles) {}
  void run(sys::Worker& w) noexcept override {
    const int64_t size = bench_.tile_bytes(), count = bench_.layout_.tiles();
    uint8_t* part = bench_.memory_.data() + w.rank * bench_.part_tiles_ * size;
    for (int64_t i = 0; i < bench_.part_tiles_; ++i)
      std::memcpy(part + i * size, tiles_ + i % count * size, size_t(size));
  }

 private:
  ProductBench& bench_;
  const uint8_t* tiles_;
};

class ProductBench::Run : public sys::Job {
 public:
  Run(ProductBench& bench, int64_t tiles) : bench_(bench), tiles_(tiles) {}
  void run(sys::Worker& w) noexcept override {
    const ProductBench& b = bench_;
    const uint8_t* part = b.memory_.data() + w.rank * b.part_tiles_ * b.tile_bytes();
    auto* out = reinterpret_cast<float*>(b.out_[size_t(w.rank)].data());
    int64_t& next = bench_.next_[size_t(w.rank)];
    b.table_->thread_begin();
    w.team_barrier();
    const auto begin = Clock::now();
    for (int64_t i = 0; i < tiles_; ++i) {
      const uint8_t* tile = part + next * b.tile_bytes();
      next = next + 1 == b.part_tiles_ ? 0 : next + 1;
      for (int64_t row = 0; row < b.m_; row += kRowBlock)  // as a layer does
        b.kernel_.product(tile, b.layout_, b.rows_.rows.from(row), std::min(kRowBlock, b.m_ - row),
                          out);
    }
    w.team_barrier();
    if (w.rank == 0) seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    b.table_->thread_end();
  }
  double seconds = 0;

 private:
  ProductBench& bench_;
  const int64_t tiles_;
};

ProductBench::ProductBench(std::shared_ptr<sys::Team> team, const KernelTable* table, bool gemm,
                           const MatrixLayout& layout, const WeightSource& weights, int64_t bytes)
    : team_(std::move(team)),
      table_(table),
      layout_(layout),
      kernel_(kernel_of(*table, gemm, layout)),
      part_tiles_(std::max<int64_t>(
          1, ceil_div(checked_bytes(bytes), team_->threads() * layout.tile_bytes()))),
      memory_(size_t(team_->threads() * part_tiles_ * layout.tile_bytes())),
      next_(size_t(team_->threads())) {
  const sys::Mapping packed = pack_whole(layout, weights);
  const auto job = std::make_shared<Fill>(*this, packed.data());
  team_->submit(job);
  job->wait();
  for (int i = 0; i < team_->threads(); ++i)
    out_.emplace_back(size_t((kRowBlock + kRowSlack) * kTileRows) * sizeof(float));
}

void ProductBench::set_rows(const float* x, int64_t m) {
  need(m >= 1, "0 rows; accepted: 1 or more");
  rows_ = operand_rows(*table_, kernel_, layout_, x, m);
  m_ = m;
}

double ProductBench::run(int64_t tiles) {
  need(m_ > 0, "set_rows must be called before run");
  need_in_range("tiles", tiles, 1, std::numeric_limits<int32_t>::max());
  const auto job = std::make_shared<Run>(*this, tiles);
  team_->submit(job);
  job->wait();
  return job->seconds;
}

}  // namespace kt
