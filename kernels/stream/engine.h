// Layers whose passes GPU kernels start and wait for, without a call from the host.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "host_buffer.h"
#include "side.h"
#include "trace.h"

namespace kt {

class MoeLayer;
class StreamPoller;

// A kernel before the layer writes a batch to a StreamSide and publishes an entry of the ring; a
// kernel after it waits for the side's done word. Entry number s (uint32; the first is 1, it wraps)
// is ring[s & (entries - 1)] = (uint64(slot) << 32) | s, written with one 8-byte store after a
// system fence. head is the number of the last entry taken: who publishes s needs
// s - head <= entries, which the poller soon brings about whatever it is given.
//
// A thread of the engine polls the ring and hands jobs to the layers' teams. Every entry with a
// slot gets its done word: when its job is done, when it cannot be started, or when the watchdog's
// time is over. The thread never needs the GIL.
//
// In the child of a fork all functions throw std::runtime_error, and destruction leaves the
// parent's state behind.
class StreamEngine {
 public:
  // entries: a power of two. `first`: the number before the first entry (tests). Throws
  // std::invalid_argument, std::bad_alloc.
  StreamEngine(int64_t entries, double watchdog_seconds, uint32_t first, bool traces);
  ~StreamEngine();  // stops
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  const std::shared_ptr<HostBuffer>& buffer() const { return buffer_; }
  int64_t entries() const { return entries_; }
  uint64_t* ring() const { return reinterpret_cast<uint64_t*>(buffer_->data()); }
  uint32_t* head() const;

  // The number of a slot, never used again. chain and position say whose deferred experts a layer
  // adds: those of position - 1 of the same chain, if they came last in it and with as many tokens.
  // protected_k >= top_k: it defers nothing itself; otherwise the side needs a partial. All experts
  // of the layer must be loaded. Throws std::invalid_argument, std::system_error.
  int64_t add_slot(std::shared_ptr<MoeLayer> layer, std::string where,
                   std::shared_ptr<StreamSide> side, int64_t chain, int64_t position,
                   int64_t protected_k);
  // The layer goes as soon as no job runs; its side stays, since a graph may still ring, unless
  // `forget` says that nothing will.
  void drop_slot(int64_t slot, bool forget = false);
  int64_t entries_of(int64_t slot);  // that were handled: their layer is not needed for them

  // Throws std::runtime_error with the first not yet raised, or once the engine was stopped.
  void raise_error();
  int64_t pending() const;  // entries taken whose done word was not yet written
  // Waits until what was rung is done, deferred experts included; false after the time.
  bool drain(double timeout_seconds);
  void stop();  // handles what was rung, waits for its done words, ends the thread
  void wake();  // something will be rung at once: ends a sleep of the poller
  std::map<std::string, int64_t> stats() const;
  // What happened to entries that were not in it before: an entry comes once its side has the next
  // one, or the engine was stopped. Empty without `traces`.
  std::vector<StreamTrace::Row> take_trace();

 private:
  StreamPoller& poller() const;  // throws in a child

  const int64_t entries_;
  const uint32_t forks_;
  std::shared_ptr<HostBuffer> buffer_;
  std::unique_ptr<StreamPoller> poller_;
};

}  // namespace kt
