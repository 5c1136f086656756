#include "engine.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <utility>

#include "../moe/state.h"
#include "../sys/fork.h"
#include "../sys/need.h"
#include "poller.h"

namespace kt {
namespace {

constexpr int64_t kMaxEntries = 1 << 20;
constexpr double kMaxSeconds = 1e9;

int64_t checked(int64_t entries, double watchdog_seconds) {
  need(entries >= 2 && entries <= kMaxEntries && std::has_single_bit(uint64_t(entries)),
       "entries " + std::to_string(entries) + "; accepted: a power of two from 2 to " +
           std::to_string(kMaxEntries));
  need(watchdog_seconds > 0,  // not NaN
       "watchdog_seconds " + std::to_string(watchdog_seconds) + "; accepted: more than 0");
  return entries;
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(int64_t(std::clamp(seconds, 0.0, kMaxSeconds) * 1e9));
}

std::string differs(const char* what, int64_t layer, int64_t side) {
  return std::string(": the layer's ") + what + " is " + std::to_string(layer) + ", the side's " +
         std::to_string(side);
}

int small(const char* name, int64_t value) {
  need(value >= 0 && value < std::numeric_limits<int>::max(),
       std::string(name) + " " + std::to_string(value) + "; accepted: 0 or more");
  return int(value);
}

}  // namespace

StreamEngine::StreamEngine(int64_t entries, double watchdog_seconds, uint32_t first, bool traces)
    : entries_(checked(entries, watchdog_seconds)),
      forks_(sys::forks()),
      buffer_(std::make_shared<HostBuffer>(round_up(entries * int64_t(sizeof(uint64_t)), kApart) +
                                           kApart)) {
  std::fill_n(ring(), entries, uint64_t(first));  // matches no entry's number for a long time
  *head() = first;
  poller_ = std::make_unique<StreamPoller>(buffer_, ring(), head(), uint32_t(entries),
                                           nanoseconds(watchdog_seconds), first, traces);
}

StreamEngine::~StreamEngine() {
  if (sys::forks() != forks_) poller_.release()->leave_behind();
}

uint32_t* StreamEngine::head() const {
  const int64_t ring_bytes = round_up(entries_ * int64_t(sizeof(uint64_t)), kApart);
  return reinterpret_cast<uint32_t*>(buffer_->data() + ring_bytes);
}

StreamPoller& StreamEngine::poller() const {
  if (sys::forks() != forks_)
    throw std::runtime_error(
        "this stream engine belongs to the parent process: its thread and its memory do not exist "
        "in a child made by fork");
  return *poller_;
}

int64_t StreamEngine::add_slot(std::shared_ptr<MoeLayer> layer, std::string where,
                               std::shared_ptr<StreamSide> side, int64_t chain, int64_t position,
                               int64_t protected_k) {
  StreamPoller& poller = this->poller();
  need(layer != nullptr && side != nullptr, where + ": a layer and a side are needed");
  const LayerState& state = *layer->state();
  const LayerConfig& config = state.config;
  need(config.hidden_size == side->hidden(),
       where + differs("hidden size", config.hidden_size, side->hidden()));
  need(config.top_k == side->top_k(), where + differs("top_k", config.top_k, side->top_k()));
  need(protected_k >= config.top_k || side->partial(),
       where + ": a layer that defers experts needs a side with a partial");
  for (int64_t slot = 0; slot < config.num_experts; ++slot)
    need(!config.on_cpu[size_t(slot)] || state.loaded[size_t(slot)],
         where + ": expert slot " + std::to_string(slot) + " is not loaded");
  const int in_chain = small("chain", chain), at = small("position", position);
  need(side->buffer()->here(),
       where + ": the side belongs to the parent process; its memory does not exist here");
  need(side->belongs_to(this), where + ": the side belongs to another engine");
  return poller.add_slot(std::move(layer), std::move(where), std::move(side), in_chain, at,
                         protected_k);
}

void StreamEngine::drop_slot(int64_t slot, bool forget) { poller().drop_slot(slot, forget); }
int64_t StreamEngine::entries_of(int64_t slot) { return poller().entries_of(slot); }

void StreamEngine::raise_error() {
  StreamPoller& poller = this->poller();
  if (poller.stopping())
    throw std::runtime_error("the stream engine was stopped: the GPU would wait for ever");
  poller.errors().raise();
}

int64_t StreamEngine::pending() const {
  return poller().progress().pending.load(std::memory_order_acquire);
}

bool StreamEngine::drain(double timeout) {
  need(timeout >= 0,  // not NaN
       "timeout " + std::to_string(timeout) + " s; accepted: 0 or more");
  return poller().drain(nanoseconds(timeout));
}
void StreamEngine::stop() { poller().stop(); }
void StreamEngine::wake() { poller().wake(); }

std::vector<StreamTrace::Row> StreamEngine::take_trace() {
  StreamTrace* const trace = poller().trace();
  return trace ? trace->take() : std::vector<StreamTrace::Row>();
}

std::map<std::string, int64_t> StreamEngine::stats() const {
  StreamPoller& p = poller();
  const StreamStats& s = p.stats();
  return {{"entries", s.entries},
          {"immediate_jobs", s.immediate_jobs},
          {"empty", s.empty},
          {"deferred_jobs", s.deferred_jobs},
          {"carried", s.carried},
          {"running", p.progress().running},
          {"errors", p.errors().count()},
          {"watchdog", s.watchdog},
          {"sleeps", s.sleeps},
          {"untraced", p.trace() ? p.trace()->dropped() : 0}};
}

}  // namespace kt
