#include "workspace.h"

#include <algorithm>
#include <memory>
#include <new>

#include "kt/training.h"
#include "rows.h"

namespace kt {
namespace {

constexpr int64_t kPadding = 128;  // bytes: two cache lines

int64_t times(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (int64_t f : factors)
    if (__builtin_mul_overflow(product, f, &product)) throw std::bad_alloc();
  return product;
}

sys::Mapping floats(std::initializer_list<int64_t> shape) {
  return sys::Mapping(size_t(times({times(shape), 4})));
}

TrainingSpace thread_space(const TrainingSize& s) {
  TrainingSpace t;
  const int64_t widest = round_up(std::max(s.hidden, s.intermediate), kTransposedColumns);
  for (bool counting : {true, false}) {
    int64_t total = 0;
    const auto place = [&]<class T>(T*& part, int64_t bytes) {
      if (!counting) part = reinterpret_cast<T*>(t.memory.data() + total);
      total += round_up(bytes, kPadding);
    };
    for (float*& tile : t.tile) place(tile, kValuesPerTile * 4);
    place(t.sums, 6 * s.rank_padded() * kTileRows * 4);
    for (float*& columns : t.columns) place(columns, times({s.pairs, kTileRows, 4}));
    place(t.row, widest * 4);
    place(t.pairs, times({s.top_k, 4}));
    place(t.parts, times({s.top_k, kMaxPools, int64_t(sizeof(WeightedRow))}));
    const int64_t inter = round_up(s.intermediate, kTileRows), rank = s.rank_padded();
    place(t.transposed, transposed_scratch(std::max(widest + rank, 2 * (inter + rank))));
    if (counting) t.memory = sys::Mapping(size_t(total));
  }
  return t;
}

}  // namespace

bool TrainingSize::holds(const TrainingSize& o) const {
  return o.max_tokens <= max_tokens && o.top_k <= top_k && o.pairs <= pairs &&
         o.experts <= experts && o.hidden <= hidden && o.intermediate <= intermediate &&
         o.rank <= rank;
}

void TrainingSize::grow_to(const TrainingSize& o) {
  max_tokens = std::max(max_tokens, o.max_tokens);
  top_k = std::max(top_k, o.top_k);
  pairs = std::max(pairs, o.pairs);
  experts = std::max(experts, o.experts);
  hidden = std::max(hidden, o.hidden);
  intermediate = std::max(intermediate, o.intermediate);
  rank = std::max(rank, o.rank);
}

// Mappings cost nothing until written, so that there is one for each use.
TrainingWorkspace::TrainingWorkspace(const TrainingSize& s, int pools, int threads)
    : size(s), ones(size_t(s.pairs), 1.0f), pair(size_t(s.pairs)) {
  const int64_t rows = s.rows(), rank = s.rank_padded();
  const int64_t h = round_up(s.hidden, kTileRows), i = round_up(s.intermediate, kTileRows);
  for (sys::Mapping& one : x) one = floats({rows, h});
  grad_out = floats({rows, h});
  const int64_t turned = s.turned_rows();
  turned_out = floats({turned, h});
  for (int m = 0; m < kMatrices; ++m) {
    rank_rows[m] = floats({rows, rank});
    rank_values[m] = floats({rows, rank});
    turned_ranks[m] = floats({turned, rank});
  }
  for (int p = 0; p < pools; ++p) {
    Pool& part = pool.emplace_back();
    for (sys::Mapping& one : part.grad) one = floats({rows, i});
    for (sys::Mapping& one : part.turned) one = floats({turned, i});
    part.h = floats({rows, i});
    for (sys::Mapping& one : part.rank) one = floats({rows, rank});
    part.dots = floats({i / kTileRows, s.pairs});
    part.gate_up = floats({s.pairs, i});  // two of bf16
    for (sys::Mapping& one : part.full) one = floats({s.pairs, i});
    for (sys::Mapping& one : part.by_pair) one = floats({s.pairs, h});
  }
  for (int t = 0; t < threads; ++t) thread.push_back(thread_space(s));
}

std::shared_ptr<TrainingWorkspace> training_workspace_for(const LayerState& layer,
                                                          const TrainingSize& wanted) {
  TrainingSize size = wanted;
  Workspace& of = *layer.workspace;
  const auto lock = workspace_lock();
  const auto present = std::static_pointer_cast<TrainingWorkspace>(of.training.lock());
  if (present) {
    if (present->size.holds(size)) return present;
    size.grow_to(present->size);
  }
  auto fresh = std::make_shared<TrainingWorkspace>(size, int(layer.pools.size()), of.threads);
  of.training = fresh;
  return fresh;
}

}  // namespace kt
