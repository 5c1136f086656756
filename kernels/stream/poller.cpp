#include "poller.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <utility>

#include "../moe/state.h"
#include "../sys/futex.h"
#include "../sys/signals.h"
#include "../sys/topology.h"

namespace kt {
namespace {

using std::chrono::nanoseconds;

// In a decode step, entries arrive every few hundred microseconds. The poller spins during a step,
// sleeps briefly between requests, and longer without any. Eager callers wake() it, so it can only
// be asleep when a replayed graph reaches its first layer.
constexpr int64_t kSpinNs = 2'000'000;
constexpr nanoseconds kNap{50'000};
constexpr int64_t kNapNs = 1'000'000'000;
constexpr nanoseconds kSleep{500'000};
// Sleeps this long instead of spinning if there are not enough CPUs.
constexpr nanoseconds kShortNap{20'000};

std::string seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", double(ns) * 1e-9);
  return text;
}

// Whether the CPU computes an expert of these routes.
bool computes_any(const MoeLayer& layer, const int64_t* ids, int64_t routes) {
  return more_pairs_than(0, ids, routes, layer.state()->on_cpu);
}

}  // namespace

StreamPoller::StreamPoller(std::shared_ptr<HostBuffer> buffer, uint64_t* ring, uint32_t* head,
                           uint32_t entries, nanoseconds watchdog, uint32_t first, bool traces)
    : buffer_(std::move(buffer)),
      ring_(ring),
      head_(head),
      mask_(entries - 1),
      watchdog_ns_(watchdog.count()),
      trace_(traces ? std::make_unique<StreamTrace>() : nullptr),
      next_(first + 1) {}

StreamPoller::~StreamPoller() { stop(); }

int64_t StreamPoller::add_slot(std::shared_ptr<MoeLayer> layer, std::string where,
                               std::shared_ptr<StreamSide> side, int chain, int position,
                               int64_t protected_k) {
  const LayerConfig& config = layer->config();
  sys::Team& team = layer->team();
  if (team.threads() + sys::kBesideTeam > sys::usable_cpus()) crowded_ = true;
  start_thread();
  std::lock_guard lock(mutex_);
  Carry* const carry = &chains_[chain];
  slots_.push_back({std::move(where), std::move(side), chain, position, protected_k, carry, &team,
                    DeferredSplit(config.num_experts, config.top_k), std::move(layer)});
  return int64_t(slots_.size()) - 1;
}

void StreamPoller::start_thread() {
  std::lock_guard lock(thread_mutex_);
  if (stopping_) throw std::runtime_error("the stream engine was stopped");
  if (thread_.joinable()) return;
  const sys::SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

StreamSlot& StreamPoller::at(int64_t slot) {
  if (slot < 0 || slot >= int64_t(slots_.size()))
    throw std::invalid_argument("slot " + std::to_string(slot) + " of " +
                                std::to_string(slots_.size()));
  return slots_[size_t(slot)];
}

void StreamPoller::drop_slot(int64_t slot, bool forget) {
  std::shared_ptr<MoeLayer> dropped;  // destroyed after the lock is released
  std::shared_ptr<StreamSide> side;
  std::lock_guard lock(mutex_);
  StreamSlot& found = at(slot);
  dropped = std::move(found.layer);
  found.forgotten |= forget;
  if (found.forgotten && !found.busy) side = std::move(found.side);
}

int64_t StreamPoller::entries_of(int64_t slot) {
  std::lock_guard lock(mutex_);
  return at(slot).entries;
}

// The slot of an entry, whose side stays until release(). Null if the slot does not exist (any
// more).
StreamSlot* StreamPoller::claim(uint32_t slot) {
  std::lock_guard lock(mutex_);
  if (slot >= slots_.size() || !slots_[slot].side) return nullptr;
  slots_[slot].busy = true;
  return &slots_[slot];
}

void StreamPoller::release(StreamSlot& slot) {
  std::shared_ptr<StreamSide> side;  // destroyed after the lock is released
  std::lock_guard lock(mutex_);
  slot.busy = false;
  ++slot.entries;
  if (slot.forgotten) side = std::move(slot.side);
}

// seq_cst on both words, here and in sleep(): either this sees the sleeper, or the sleeper sees the
// new count.
void StreamPoller::wake() {
  wake_.fetch_add(1);
  if (asleep_.load()) sys::futex_wake_all(&wake_);
}

void StreamPoller::stop() {
  std::thread thread;
  {
    std::lock_guard lock(thread_mutex_);
    stopping_ = true;
    thread = std::move(thread_);
    if (thread.joinable()) ending_ = true;
  }
  wake();
  // Without a lock, because joining may take as long as the watchdog.
  if (!thread.joinable()) return ending_.wait(true);
  thread.join();
  if (trace_) {
    std::lock_guard lock(mutex_);  // drop_slot() removes sides, from any thread
    for (StreamSlot& slot : slots_)
      if (slot.side) trace_->add(trace_->next(*slot.side, nullptr));
  }
  ending_ = false;
  ending_.notify_all();
}

void StreamPoller::leave_behind() {
  if (!mutex_.try_lock()) return;  // held at the fork: slots_ may be in the middle of a change
  slots_.clear();
  mutex_.unlock();
}

bool StreamPoller::drain(nanoseconds timeout) {
  const int64_t end = sys::now_ns() + timeout.count();
  wake();
  for (;;) {
    // The order matters: an entry counts as pending and running before head shows that it was
    // taken, and its jobs count as running before the entry stops counting.
    const uint32_t next = std::atomic_ref(*head_).load(std::memory_order_acquire) + 1;
    const auto entry = std::atomic_ref(ring_[next & mask_]).load(std::memory_order_acquire);
    if (uint32_t(entry) != next && !progress_->pending.load(std::memory_order_acquire) &&
        !progress_->running.load(std::memory_order_acquire))
      return true;
    if (sys::now_ns() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// ---- The poller's thread.

void StreamPoller::run() noexcept {
  pthread_setname_np(pthread_self(), "kt-stream");
  prctl(PR_SET_TIMERSLACK, 1ul, 0, 0, 0);
  last_ = sys::now_ns();
  for (;;) {
    if (rung()) {
      take();
    } else if (stopping_.load(std::memory_order_acquire)) {
      // Entries from before stop() are visible by now, so look for the next one once more.
      if (rung()) continue;
      if (!progress_->pending.load(std::memory_order_acquire)) return;
      idle();
    } else {
      idle();
    }
  }
}

bool StreamPoller::rung() const {
  // acquire: everything that the GPU wrote before it rang is visible.
  return uint32_t(std::atomic_ref(ring_[next_ & mask_]).load(std::memory_order_acquire)) == next_;
}

void StreamPoller::take() noexcept {
  const uint64_t entry = std::atomic_ref(ring_[next_ & mask_]).load(std::memory_order_relaxed);
  const uint32_t number = next_++;
  last_ = sys::now_ns();
  crowded(last_);
  spun_ = 0;
  stats_.entries.fetch_add(1, std::memory_order_relaxed);
  progress_->pending.fetch_add(1, std::memory_order_relaxed);
  progress_->running.fetch_add(1, std::memory_order_relaxed);
  // At once, because the ring needs the room, whatever happens to the entry. release: see drain().
  std::atomic_ref(*head_).store(number, std::memory_order_release);
  handle(uint32_t(entry >> 32), number);
  progress_->running.fetch_sub(1, std::memory_order_release);
}

void StreamPoller::handle(uint32_t slot, uint32_t number) noexcept {
  StreamSlot* const found = claim(slot);
  if (!found) {
    errors_.record({"entry ", std::to_string(number), " of the stream names slot ",
                    std::to_string(slot), ", which does not exist"});
    progress_->pending.fetch_sub(1, std::memory_order_release);
    errors_.say();
    return;
  }
  const Entry entry{*found, number, last_,
                    std::atomic_ref(*found->side->tokens()).load(std::memory_order_relaxed)};
  retire();
  std::shared_ptr<TraceRecord> before;
  if (trace_) before = trace_->next(*found->side, record_of(slot, entry));
  try {
    start(entry);
  } catch (const std::exception& error) {
    fail(entry, Out::kZero, {error.what()});
  } catch (...) {
    fail(entry, Out::kZero, {"unknown error"});
  }
  if (before) trace_->add(before);  // its deferred job is done; see start()
  release(*found);
}

// Returns null if there is not enough memory.
std::shared_ptr<TraceRecord> StreamPoller::record_of(uint32_t slot, const Entry& entry) noexcept {
  try {
    const auto record = std::make_shared<TraceRecord>();
    const StreamTimes& times = *entry.slot.side->times();
    record->slot = slot;
    record->number = entry.number;
    record->position = entry.slot.position;
    record->chain = entry.slot.chain;
    record->tokens = entry.tokens;
    record->hand_start = times.hand_start;
    record->hand_end = times.hand_end;
    record->seen = entry.since;
    return record;
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Throws only while the GPU still waits and no job of this entry has been queued.
void StreamPoller::start(const Entry& entry) {
  StreamSlot& slot = entry.slot;
  StreamSide& side = *slot.side;
  const int64_t tokens = entry.tokens;
  Carry carry = std::exchange(*slot.carry, {});
  if (tokens < 1 || tokens > side.capacity())
    return fail(entry, Out::kLeave,
                {"a batch of ", std::to_string(tokens), " tokens was submitted; accepted: 1 to ",
                 std::to_string(side.capacity())});
  const bool follows = slot.position > 0 && carry.position + 1 == slot.position &&
                       carry.tokens == tokens && carry.side &&
                       carry.side->dtype() == side.dtype() && carry.side->hidden() == side.hidden();
  if (!follows) carry = {};
  // The previous layer still reads x for its deferred experts, but this batch has overwritten it.
  if (carry.side == slot.side)
    return fail(
        entry, Out::kZero,
        {"this batch uses the buffers of the previous layer, whose deferred experts still read "
         "them"});
  // Jobs of one team run in order, but those of another team may still compute the sum to add.
  if (!wait_for(side, entry)) return;
  if (carry.side && carry.team != slot.team && !wait_for(*carry.side, entry)) return;
  {
    // Held briefly, while jobs are created and queued, so that the layer cannot be deleted.
    std::lock_guard lock(mutex_);
    if (slot.layer) return submit(entry, *slot.layer, carry);
  }
  fail(entry, Out::kZero, {"was freed, but a CUDA graph still calls it"});
}

void StreamPoller::submit(const Entry& entry, MoeLayer& layer, const Carry& carry) {
  StreamSlot& slot = entry.slot;
  StreamSide& side = *slot.side;
  StreamSide::Private& priv = side.priv;
  const int64_t tokens = entry.tokens, routes = tokens * side.top_k();
  std::copy_n(side.ids(), routes, priv.immediate.get());
  std::copy_n(side.weights(), routes, priv.weights.get());
  const bool defers = slot.protected_k < side.top_k();
  if (defers)
    slot.split.run(priv.weights.get(), tokens, slot.protected_k, priv.immediate.get(),
                   priv.deferred.get());
  if (!carry.side && !computes_any(layer, priv.immediate.get(), routes)) {
    side.zero_out(tokens);
    ring(side, entry.number, *progress_, priv.record.get());
    stats_.empty.fetch_add(1, std::memory_order_relaxed);
    if (defers)
      defer(
          entry, layer,
          {side.x(), side.dtype(), tokens, nullptr, priv.weights.get(), nullptr, nullptr, nullptr});
    return;
  }
  const ForwardArgs args{side.x(),
                         side.dtype(),
                         tokens,
                         priv.immediate.get(),
                         priv.weights.get(),
                         side.out(),
                         carry.side ? carry.side->partial() : nullptr,
                         nullptr};
  const auto job = std::make_shared<StreamJob>(
      layer.state(), args, StreamJob::Uses{slot.side, carry.side, progress_, priv.record},
      layer.team(), entry.number);
  queue(job, entry, layer.team(), true);
  stats_.immediate_jobs.fetch_add(1, std::memory_order_relaxed);
  if (carry.side) stats_.carried.fetch_add(1, std::memory_order_relaxed);

  if (defers) defer(entry, layer, args);
  layer.team().expect_until(sys::now_ns() + kExpectNs);
}

// Queues the sum that the next layer will add, if the CPU holds any of the deferred experts. The
// GPU does not wait for it.
void StreamPoller::defer(const Entry& entry, MoeLayer& layer, ForwardArgs args) noexcept {
  StreamSlot& slot = entry.slot;
  const int64_t* const ids = slot.side->priv.deferred.get();
  if (!computes_any(layer, ids, entry.tokens * slot.side->top_k())) return;
  args.ids = ids;
  args.out = nullptr;
  args.add = nullptr;
  args.partial = slot.side->partial();
  try {
    const auto job = std::make_shared<StreamJob>(
        layer.state(), args, StreamJob::Uses{slot.side, nullptr, progress_, slot.side->priv.record},
        layer.team(), std::nullopt);
    queue(job, entry, layer.team(), false);
  } catch (const std::exception& error) {
    errors_.record({slot.where, ": deferred experts are lost: ", error.what()});
    errors_.say();
    return;
  }
  stats_.deferred_jobs.fetch_add(1, std::memory_order_relaxed);
  *slot.carry = {slot.position, entry.tokens, slot.side, slot.team};
}

void StreamPoller::queue(const std::shared_ptr<StreamJob>& job, const Entry& entry, sys::Team& team,
                         bool watched) {
  running_.push_back({job, &entry.slot, entry.since, watched});
  ++job->side().priv.in_flight;
  progress_->running.fetch_add(1, std::memory_order_relaxed);
  try {
    team.submit(job);
  } catch (...) {
    running_.pop_back();
    --job->side().priv.in_flight;
    progress_->running.fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
}

// Answers an entry without a job.
void StreamPoller::fail(const Entry& entry, Out out,
                        std::initializer_list<std::string_view> why) noexcept {
  std::string text;
  try {
    for (std::string_view part : why) text += part;
  } catch (const std::exception&) {
    text.clear();  // out of memory: report only the place
  }
  errors_.record({entry.slot.where, ": ", text});
  const StreamSide& side = *entry.slot.side;
  if (out == Out::kZero && entry.tokens > 0 && entry.tokens <= side.capacity())
    side.zero_out(entry.tokens);
  ring(side, entry.number, *progress_, side.priv.record.get());
  errors_.say();
}

// Waits until the jobs submitted on a side are done. Returns false if the watchdog gives up the
// entry first.
bool StreamPoller::wait_for(StreamSide& side, const Entry& entry) noexcept {
  for (int64_t now = 0; side.priv.in_flight; now = sys::now_ns()) {
    if (now)
      watch(now);  // first, so that an older entry of this side is never answered after this one
    if (now - entry.since > watchdog_ns_) {
      const std::string age = seconds(now - entry.since);
      stats_.watchdog.fetch_add(1, std::memory_order_relaxed);
      fail(entry, Out::kLeave,  // the earlier batch may be writing the output
           {"not started for ", age,
            ": an earlier batch in the same buffers is still being computed; the GPU continues "
            "without a result"});
      return false;
    }
    const auto done = [&] { return retire(), !side.priv.in_flight; };
    if (sys::spin_until(done, nanoseconds(crowded_ ? 1'000 : 20'000))) break;
    if (crowded_)
      std::this_thread::sleep_for(kShortNap);
    else if (now - entry.since > kSpinNs)
      std::this_thread::sleep_for(kNap);
  }
  return true;
}

void StreamPoller::retire() noexcept {
  std::erase_if(running_, [](const Running& running) {
    if (!running.job->done()) return false;
    --running.job->side().priv.in_flight;
    return true;
  });
}

void StreamPoller::watch(int64_t now) noexcept {
  for (Running& running : running_) {
    if (!running.watched || now - running.since <= watchdog_ns_) continue;
    running.watched = false;
    if (running.job->rung()) continue;
    const std::string age = seconds(now - running.since);
    stats_.watchdog.fetch_add(1, std::memory_order_relaxed);
    errors_.record({running.slot->where, ": no result for ", age,
                    ": the layer's job is still waiting for CPU threads or running; the GPU "
                    "continues without a result"});
    running.job->ring();
    errors_.say();
  }
}

// Called between two entries.
void StreamPoller::idle() noexcept {
  for (int i = 0; i < 16; ++i) {
    _mm_pause();
    if (rung()) return;
  }
  const int64_t now = sys::now_ns();
  if (!running_.empty()) {
    retire();
    watch(now);
  }
  if (const uint32_t count = wake_.load(); count != woken_) {
    woken_ = count;
    last_ = now;
  }
  const int64_t quiet = now - last_;
  const bool naps = crowded(now);
  if (quiet > kSpinNs)
    sleep(quiet > kNapNs ? kSleep : kNap);
  else if (naps)
    sleep(kShortNap);
  else
    spun_ = now;
}

// Whether a spin would take the CPU from a worker, or would be interrupted for long by other
// processes, as the last spin was.
bool StreamPoller::crowded(int64_t now) noexcept {
  if (spun_) crowding_.spun(spun_, now);
  return crowding_.at(now) || crowded_.load(std::memory_order_relaxed);
}

void StreamPoller::sleep(nanoseconds time) noexcept {
  spun_ = 0;
  asleep_.store(true);
  if (wake_.load() == woken_ && !rung()) {
    stats_.sleeps.fetch_add(1, std::memory_order_relaxed);
    sys::futex_wait_for(&wake_, woken_, time);
  }
  asleep_.store(false, std::memory_order_relaxed);
}

}  // namespace kt
