// Runs layers whose passes GPU kernels start and await, without a call from the host.
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

// A kernel before the layer writes a batch to a StreamSide and publishes an entry of the ring. A
// kernel after the layer waits for the side's done word. Entry number s (uint32; the first is 1; it
// wraps around) is ring[s & (entries - 1)] = (uint64(slot) << 32) | s, written with one 8-byte
// store after a system fence. head is the number of the last entry taken. Before publishing entry
// s, wait until s - head <= entries, which always happens because the poller takes every entry.
//
// A thread of the engine polls the ring and submits jobs to the layers' teams. Every entry with a
// slot gets its done word: when its job is done, when it cannot be started, or when the watchdog's
// time is over. The thread never needs the GIL.
//
// In a forked child, all functions throw std::runtime_error, and destruction does not touch the
// parent's state.
class StreamEngine {
 public:
  // entries: a power of two. first: the number before the first entry (for tests). Throws
  // std::invalid_argument, std::bad_alloc.
  StreamEngine(int64_t entries, double watchdog_seconds, uint32_t first, bool traces);
  ~StreamEngine();  // stops
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  const std::shared_ptr<HostBuffer>& buffer() const { return buffer_; }
  int64_t entries() const { return entries_; }
  uint64_t* ring() const { return reinterpret_cast<uint64_t*>(buffer_->data()); }
  uint32_t* head() const;

  // Returns the number of a slot, which is never reused. chain and position determine whose
  // deferred experts a layer adds: those of position - 1 in the same chain, if that layer was the
  // last one in it and had as many tokens. With protected_k >= top_k, the layer itself defers
  // nothing; otherwise the side needs a partial. All experts of the layer must be loaded. Throws
  // std::invalid_argument, std::system_error.
  int64_t add_slot(std::shared_ptr<MoeLayer> layer, std::string where,
                   std::shared_ptr<StreamSide> side, int64_t chain, int64_t position,
                   int64_t protected_k);
  // Releases the layer as soon as no job runs. Its side stays, because a graph may still ring,
  // unless `forget` is true.
  void drop_slot(int64_t slot, bool forget = false);
  int64_t entries_of(int64_t slot);  // handled entries, which no longer need the layer

  // Throws std::runtime_error with the first error not yet raised, or if the engine was stopped.
  void raise_error();
  int64_t pending() const;  // entries taken whose done word has not been written yet
  // Waits until all entries are done, deferred experts included; returns false after the timeout.
  bool drain(double timeout_seconds);
  void stop();  // handles the entries so far, waits for their done words, ends the thread
  void wake();  // wakes the poller, because an entry will follow at once
  std::map<std::string, int64_t> stats() const;
  // Records of entries since the last call. An entry is included once its side has the next one, or
  // the engine was stopped. Empty without `traces`.
  std::vector<StreamTrace::Row> take_trace();

 private:
  StreamPoller& poller() const;  // throws in a child

  const int64_t entries_;
  const uint32_t forks_;
  std::shared_ptr<HostBuffer> buffer_;
  std::unique_ptr<StreamPoller> poller_;
};

}  // namespace kt
