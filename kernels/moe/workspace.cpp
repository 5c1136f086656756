#include "workspace.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace kt {
namespace {

constexpr int64_t kMaxActBytes = 4;       // float32 holding bf16 values
constexpr int64_t kMinGroup = kSumGroup;  // scales and sums per row: at most one per 16 columns
constexpr int64_t kMaxPadding = 128;      // of columns, for any layout
constexpr int64_t kPlanBytes = 64;        // a plan takes at least this much per pair
constexpr int64_t kThreadPadding = 128;   // bytes: two cache lines

constexpr int64_t WorkspaceCapacity::*kCounts[] = {
    &WorkspaceCapacity::tokens,  &WorkspaceCapacity::hidden, &WorkspaceCapacity::intermediate,
    &WorkspaceCapacity::experts, &WorkspaceCapacity::pairs,  &WorkspaceCapacity::pair_rows,
    &WorkspaceCapacity::sums};
static_assert(sizeof(WorkspaceCapacity) == sizeof(int64_t) * std::size(kCounts));

// A count computed from a caller's sizes. Throws instead of wrapping around, which would make a
// large buffer small.
class Count {
 public:
  Count(int64_t value) : value_(value) {
    if (value < 0) throw std::bad_alloc();
  }
  Count operator*(Count other) const {
    int64_t result;
    if (__builtin_mul_overflow(value_, other.value_, &result)) throw std::bad_alloc();
    return result;
  }
  Count operator+(Count other) const {
    int64_t result;
    if (__builtin_add_overflow(value_, other.value_, &result)) throw std::bad_alloc();
    return result;
  }
  int64_t value() const { return value_; }
  sys::Mapping mapping() const { return sys::Mapping(size_t(value_)); }

 private:
  int64_t value_;
};

Count row_bytes(Count rows, int64_t cols) {
  return (rows + kRowSlack) * (cols + kMaxPadding) * kMaxActBytes;
}
Count scale_bytes(Count rows, int64_t cols) {
  return (rows + kRowSlack) * ((cols + kMaxPadding) / kMinGroup * 4);
}

ActBuffer act_buffer(Count rows, int64_t cols) {
  return {row_bytes(rows, cols).mapping(), scale_bytes(rows, cols).mapping(),
          scale_bytes(rows, cols).mapping()};
}

// Sets the addresses of a thread's memory, which begins at `at` (may be null); returns its bytes.
int64_t place_parts(ThreadSpace& t, const WorkspaceCapacity& c, uint8_t* at) {
  Count total(0);
  const auto place = [&]<class T>(T*& part, Count bytes) {
    part = at ? reinterpret_cast<T*>(at + total.value()) : nullptr;
    total = total + Count(round_up(bytes.value(), kThreadPadding));
  };
  for (RowPointers& x : t.x) {
    place(x.data, row_bytes(kOwnTokens, c.hidden));
    place(x.scale, scale_bytes(kOwnTokens, c.hidden));
    place(x.sum, scale_bytes(kOwnTokens, c.hidden));
  }
  place(t.h.data, row_bytes(kFewPairs, c.intermediate));
  place(t.h.scale, (kFewPairs + kRowSlack) * 4);  // one scale and one sum per row
  place(t.h.sum, (kFewPairs + kRowSlack) * 4);
  place(t.row, row_bytes(1, std::max(c.hidden, c.intermediate)));
  place(t.ordered, row_bytes(1, c.hidden));
  place(t.scratch, 2 * (kRowBlock + kRowSlack) * kTileRows * 4);
  return total.value();
}

ThreadSpace thread_space(const WorkspaceCapacity& c, int threads) {
  ThreadSpace t{
      Plan(c.experts, kFewIds), std::vector<int64_t>(size_t(threads) + 1), {}, {}, {}, {}, {}, {}};
  t.memory = sys::Mapping(size_t(place_parts(t, c, nullptr)));
  place_parts(t, c, t.memory.data());
  return t;
}

// Workspaces by address of the team. (shared_ptrs from Python have different control blocks for the
// same team, so owner comparison fails.) A new team may get the address of a deleted one and find
// its workspace, which is harmless: an idle workspace fits any team with the same pools and
// threads.
std::map<const sys::Team*, std::weak_ptr<Workspace>> g_known;
std::mutex g_mutex;

// A fork while another thread is in workspace_for must not leave the child's mutex locked.
[[maybe_unused]] const int g_fork_hook =
    pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); }, [] { g_mutex.unlock(); });

}  // namespace

WorkspaceCapacity::WorkspaceCapacity(const WorkspaceSize& s)
    : tokens(s.max_tokens), hidden(s.hidden), intermediate(s.intermediate), experts(s.experts) {
  pairs = (Count(s.max_tokens) * s.top_k).value();
  // GEMM experts have whole blocks, and one may follow a GEMV expert.
  pair_rows = (Count(std::min(pairs, s.experts)) * (2 * (kBlockRows - 1)) + pairs).value();
  sums = (Count(round_up(s.hidden, kTileRows)) * expert_groups(s.experts, s.hidden) * s.max_tokens)
             .value();
}

bool WorkspaceCapacity::holds(const WorkspaceCapacity& o) const {
  return std::ranges::all_of(kCounts, [&](auto count) { return o.*count <= this->*count; });
}

void WorkspaceCapacity::grow_to(const WorkspaceCapacity& o) {
  for (auto count : kCounts) this->*count = std::max(this->*count, o.*count);
}

// Mappings cost nothing until they are written, so every buffer has the size of its largest use.
Workspace::Workspace(const WorkspaceCapacity& c, int pools, int team_threads)
    : capacity(c),
      threads(team_threads),
      plan(c.experts, (Count(c.pairs) * kPlanBytes).value() / kPlanBytes),
      slots(size_t(team_threads)),
      sums_done(new std::atomic<int>[size_t(ceil_div(c.hidden, kTileRows))]()) {
  for (ActBuffer& one : x) one = act_buffer(c.tokens, c.hidden);
  for (ActBuffer& one : gathered) one = act_buffer(c.pair_rows, c.hidden);
  h_float = row_bytes(c.pair_rows, c.intermediate).mapping();
  const Count few = std::min(c.pairs, kFewPairs);
  for (int p = 0; p < pools; ++p) {
    h.push_back(act_buffer(c.pair_rows, c.intermediate));
    results.push_back((Count(round_up(c.hidden, kTileRows)) * few * 4).mapping());
    sum.push_back((Count(c.sums) * 4).mapping());
  }
  for (int i = 0; i < threads; ++i) thread.push_back(thread_space(c, threads));
}

void Workspace::renew_after_fork() {
  process.ensure([this] {
    // relaxed: every thread of this process's passes gets them after this.
    for (sys::TaskSlot& slot : slots) slot.word.store(0, std::memory_order_relaxed);
    for (int64_t i = 0; i < ceil_div(capacity.hidden, kTileRows); ++i)
      sums_done[size_t(i)].store(0, std::memory_order_relaxed);
    phase = 0;
  });
}

std::unique_lock<std::mutex> workspace_lock() { return std::unique_lock(g_mutex); }

std::shared_ptr<Workspace> workspace_for(const sys::Team& team, const WorkspaceSize& size) {
  WorkspaceCapacity capacity(size);
  const auto lock = workspace_lock();
  std::erase_if(g_known, [](const auto& entry) { return entry.second.expired(); });
  const auto found = g_known.find(&team);
  const auto present = found == g_known.end() ? nullptr : found->second.lock();
  if (present && int(present->sum.size()) == team.pools() && present->threads == team.threads()) {
    if (present->capacity.holds(capacity)) return present;
    capacity.grow_to(present->capacity);
  }
  auto fresh = std::make_shared<Workspace>(capacity, team.pools(), team.threads());
  g_known[&team] = fresh;
  return fresh;
}

}  // namespace kt
