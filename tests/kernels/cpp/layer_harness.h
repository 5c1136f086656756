// Shared by the C++ tests that run a small layer: the layer, batches for it, and a single pass.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "moe/layer.h"

constexpr int64_t kHidden = 64, kInter = 96, kExperts = 4, kTopK = 2;

struct Batch {
  int64_t tokens;
  std::vector<float> x, weights;
  std::vector<int64_t> ids;  // one in five is not an expert
};

inline Batch make_batch(unsigned seed, int64_t tokens) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Batch b{tokens, {}, {}, {}};
  for (int64_t i = 0; i < b.tokens * kHidden; ++i) b.x.push_back(normal(random));
  for (int64_t i = 0; i < b.tokens * kTopK; ++i) {
    b.ids.push_back(int64_t(random() % (kExperts + 1)) - 1);
    b.weights.push_back(normal(random));
  }
  return b;
}

inline std::shared_ptr<kt::MoeLayer> make_layer(const std::shared_ptr<kt::sys::Team>& team,
                                                unsigned seed, int64_t max_tokens) {
  const kt::MatrixForm form{kt::WeightFormat::kBF16, 0, kt::ScaleType::kFP16};
  auto layer = std::make_shared<kt::MoeLayer>(
      team, kt::LayerConfig{kExperts,
                            kTopK,
                            kHidden,
                            kInter,
                            {form, form, form},
                            {0, 0},
                            std::vector<uint8_t>(size_t(kExperts), 1),
                            max_tokens,
                            kt::kKernelTables[0],
                            kt::KernelKind::kAuto,
                            {}});
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.1f);
  for (int64_t slot = 0; slot < kExperts; ++slot) {
    std::array<std::vector<float>, 3> w;
    kt::SlotSource source{slot, {}};
    for (int m = 0; m < 3; ++m) {
      for (int64_t i = 0; i < kHidden * kInter; ++i) w[size_t(m)].push_back(normal(random));
      source.source.weights[m] = {w[size_t(m)].data(), kt::DType::kFP32};
    }
    layer->load({source});
  }
  return layer;
}

// Queues a pass over a batch, with its own ids or the given ones. It writes y; all arguments are in
// use until it is done.
inline std::shared_ptr<kt::sys::Job> submit(kt::MoeLayer& layer, const Batch& b,
                                            const std::vector<int64_t>& ids, float* y,
                                            const float* add = nullptr) {
  return layer.submit(
      {b.x.data(), kt::DType::kFP32, b.tokens, ids.data(), b.weights.data(), y, add, nullptr});
}

inline std::vector<float> by_hand(kt::MoeLayer& layer, const Batch& b,
                                  const std::vector<int64_t>& ids, const float* add = nullptr) {
  std::vector<float> y(b.x.size());
  submit(layer, b, ids, y.data(), add)->wait();
  return y;
}
