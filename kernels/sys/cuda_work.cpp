#include "sys/cuda_work.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "sys/fork.h"
#include "sys/need.h"

namespace kt::sys {

SyncedCopies::SyncedCopies(const CudaContext& context, uint64_t stream, std::vector<Copy> to_device,
                           std::vector<Copy> to_host)
    : context_(context),
      stream_(stream),
      to_device_(std::move(to_device)),
      to_host_(std::move(to_host)) {}

void SyncedCopies::run() const {
  context_.copy(stream_, to_device_);
  context_.copy_back(stream_, to_host_);
  context_.synchronize(stream_);
}

UploadQueue::UploadQueue(const CudaContext& context, uint64_t stream)
    : context_(context), stream_(stream), forks_(forks()) {}

UploadQueue::~UploadQueue() {
  if (forks() != forks_) return;
  for (void* event : idle_) context_.destroy(event);
  for (void* event : under_way_) context_.destroy(event);
}

int64_t UploadQueue::start(const std::vector<Upload>& uploads) {
  need_own_process();
  for (const Upload& upload : uploads)
    for (const BoundLaunch* launch : upload.launches)
      need(launch->open.empty(), "a launch with open parameters; expected one without");
  const std::lock_guard lock(mutex_);
  for (const Upload& upload : uploads) {
    context_.copy(stream_, upload.copies);
    for (const BoundLaunch* launch : upload.launches) {
      uint64_t values[KernelLaunch::kMaxParameters];  // the driver's interface is not const
      std::copy(std::begin(launch->values), std::end(launch->values), values);
      launch->kernel->run(launch->grid, stream_, values, launch->wait_address);
    }
    if (idle_.empty()) idle_.push_back(context_.create_event());
    context_.record(idle_.back(), stream_);
    under_way_.push_back(idle_.back());
    idle_.pop_back();
  }
  return completed_ + int64_t(under_way_.size());
}

int64_t UploadQueue::completed() {
  need_own_process();
  const std::lock_guard lock(mutex_);
  while (!under_way_.empty() && context_.occurred(under_way_.front())) {
    idle_.push_back(under_way_.front());
    under_way_.pop_front();
    ++completed_;
  }
  return completed_;
}

void UploadQueue::wait() const {
  need_own_process();
  context_.synchronize(stream_);
}

void UploadQueue::need_own_process() const {
  if (forks() != forks_)
    throw std::runtime_error(
        "uploads belong to the parent process and cannot be used in a child made by fork");
}

}  // namespace kt::sys
