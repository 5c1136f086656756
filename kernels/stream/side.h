// One set of buffers through which a GPU hands over batches and receives results.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "host_buffer.h"
#include "kt/types.h"

namespace kt {

struct TraceRecord;

// Times of the GPU's clock in nanoseconds. back_number: the entry whose result was taken at back_*.
struct StreamTimes {
  int64_t hand_start, hand_end, back_number, back_start, back_ready, back_end;
};

// In one HostBuffer, each part 64-byte aligned and `done` on its own cache lines:
//   tokens   int32            of the batch
//   times    StreamTimes      of the kernels, if they are traced
//   done     uint32           number of the entry whose result is in `out`
//   ready    uint32           1 from then on until the GPU hands over the next batch, otherwise 0;
//                             next to `done` and written together with it
//   x        dtype[capacity, H]
//   ids      int32[capacity, k]
//   weights  float[capacity, k]
//   out      dtype[capacity, H]
//   partial  float[capacity, H]   sums for the next layer; only with_partial
//
// Who may access what, and why each side sees what the other one wrote (engine.h describes the
// ring):
//   1. GPU: sets ready to 0; writes tokens, x, ids and weights; system fence; one 8-byte store to
//      the ring.
//   2. Poller: acquire load of the entry; then reads tokens, ids and weights. The workers get the
//      job from the team, which orders its submission before their reads of x.
//   3. Workers: write out and leave the job with acquire-release. The last one writes `done` and
//      `ready` with one release store (on x86 a plain store after plain stores, which PCIe reads in
//      that order).
//   4. GPU: its stream waits until ready is 1, which leaves the GPU to other processes. Then one
//      thread of each block spins on a relaxed system load of `done` until it is its entry's
//      number; system fence; barrier of the block; reads out. The number decides, because ready may
//      be 1 from an earlier batch whose answer was not collected, and the value that a captured
//      wait compares with is a constant. If streams cannot wait, threads only spin.
// The GPU writes a side again only after 4, in the order of its stream. Deferred experts still read
// x then, until the next layer's job. That layer therefore needs another side (or gets an error),
// and the first side is free once it is done. An aborted pass may break these rules. Then x can be
// torn, but jobs use private copies of ids and weights, so nothing is indexed with unchecked ids.
class StreamSide : public std::enable_shared_from_this<StreamSide> {
 public:
  // Throws std::invalid_argument, std::bad_alloc.
  StreamSide(int64_t capacity, int64_t hidden, int64_t top_k, DType dtype, bool with_partial);

  int64_t capacity() const { return capacity_; }
  int64_t hidden() const { return hidden_; }
  int64_t top_k() const { return top_k_; }
  DType dtype() const { return dtype_; }
  const std::shared_ptr<HostBuffer>& buffer() const { return buffer_; }

  int32_t* tokens() const { return at<int32_t>(0); }
  StreamTimes* times() const { return at<StreamTimes>(times_); }
  uint32_t* done() const { return at<uint32_t>(done_); }
  uint32_t* ready() const { return done() + 1; }
  void* x() const { return at<void>(x_); }
  int32_t* ids() const { return at<int32_t>(ids_); }
  float* weights() const { return at<float>(weights_); }
  void* out() const { return at<void>(out_); }
  float* partial() const { return partial_ ? at<float>(partial_) : nullptr; }  // or null

  void zero_out(int64_t tokens) const;
  void ring(uint32_t number) const noexcept;  // writes `done` and `ready`

  // Claims the side for an engine: the first caller gets it. Returns false for any other.
  bool belongs_to(const void* engine);

  // Used by the poller only.
  struct Private {
    // [capacity, k], read by jobs while in_flight > 0. Untouched if batches are smaller.
    std::unique_ptr<int64_t[]> immediate, deferred;
    std::unique_ptr<float[]> weights;
    int in_flight = 0;                    // submitted jobs on this side that it has not seen done
    std::shared_ptr<TraceRecord> record;  // of the last entry; null if nothing is traced
  };
  Private priv;

 private:
  template <class T> T* at(int64_t offset) const {
    return reinterpret_cast<T*>(buffer_->data() + offset);
  }

  const int64_t capacity_, hidden_, top_k_;
  const DType dtype_;
  int64_t times_ = 0, done_ = 0, x_ = 0, ids_ = 0, weights_ = 0, out_ = 0, partial_ = 0;  // offsets
  std::shared_ptr<HostBuffer> buffer_;
  std::atomic<const void*> engine_{nullptr};
};

}  // namespace kt
