// What the live expert cache queues on a GPU: several calls of the driver at once.
#pragma once
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "sys/cuda_driver.h"

namespace kt::sys {

// Copies that are made again and again, each time until they are done.
class SyncedCopies {
 public:
  SyncedCopies(const CudaContext& context, uint64_t stream, std::vector<Copy> to_device,
               std::vector<Copy> to_host);

  // Queues the copies to the device, in this order, then those to the host, and waits for all of
  // them. Throws std::runtime_error with the driver's message.
  void run() const;

 private:
  const CudaContext context_;
  const uint64_t stream_;
  const std::vector<Copy> to_device_, to_host_;
};

// An expert: its copies to the device, and then the launches that write it to a slot.
struct Upload {
  std::vector<Copy> copies;
  std::vector<const BoundLaunch*> launches;  // without open parameters
};

// Uploads on a stream, one after the other. Any thread may call its functions, but not while it
// holds a lock that start() waits for, such as Python's. In a child made by fork, they throw
// std::runtime_error: CUDA does not exist there.
class UploadQueue {
 public:
  UploadQueue(const CudaContext& context, uint64_t stream);
  ~UploadQueue();  // what was started goes on
  UploadQueue(const UploadQueue&) = delete;
  UploadQueue& operator=(const UploadQueue&) = delete;

  // Starts uploads, and returns how many were started so far. Throws std::runtime_error with the
  // driver's message; the uploads before the one that failed are under way.
  int64_t start(const std::vector<Upload>& uploads);

  // How many uploads are complete: the first ones. Throws as above.
  int64_t completed();

  // Returns once all uploads are complete. Throws as above.
  void wait() const;

 private:
  const CudaContext context_;
  const uint64_t stream_;
  const uint32_t forks_;
  std::mutex mutex_;
  std::vector<void*> idle_;      // events
  std::deque<void*> under_way_;  // an event for each upload
  int64_t completed_ = 0;

  void need_own_process() const;
};

}  // namespace kt::sys
