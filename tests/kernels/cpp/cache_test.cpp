// Tests what the thread of the live expert cache does beside an engine's, with a thread in the
// place of the GPU: kernels/cache and kernels/sys/cuda_work.h. Prints failures; the exit code is
// then 1. The GPU writes slots non-atomically, so that an upload that counts as complete too early
// is a data race. The program itself has the driver's entry points.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cache/news.h"
#include "cache/scores.h"
#include "sys/cuda_work.h"
#include "team_harness.h"

namespace {

// One stream: what is queued is done in order, by a thread.
class Gpu {
 public:
  Gpu() : thread_([this] { run(); }) {}
  ~Gpu() {
    queue(nullptr);
    thread_.join();
  }
  void queue(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty(); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !work_.empty(); });
      const auto work = work_.front();
      if (!work) return;
      lock.unlock();
      work();
      lock.lock();
      work_.pop_front();  // only now: until then, the stream is not done
      changed_.notify_all();
    }
  }
};

Gpu* g_gpu;

using Event = std::atomic<bool>;

constexpr int64_t kLayers = 2, kExperts = 24, kSlots = 5, kBytes = 512;
constexpr int64_t kRow = kExperts + kt::CacheScores::kNumbers;

// The kernel of these tests: copies the staged expert to a slot.
void write_slot(const uint8_t* staged, uint8_t* slot) { std::memcpy(slot, staged, kBytes); }

}  // namespace

extern "C" {

int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   unsigned, void*, void** parameters, void**) {
  const auto staged = *static_cast<const uint8_t**>(parameters[0]);
  const auto slot = *static_cast<uint8_t**>(parameters[1]);
  const auto kernel = reinterpret_cast<decltype(&write_slot)>(function);
  g_gpu->queue([=] { kernel(staged, slot); });
  return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
  g_gpu->queue([=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
  g_gpu->queue([=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
  return 0;
}
int cuStreamSynchronize(void*) {
  g_gpu->synchronize();
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  *event = new Event(true);
  return 0;
}
int cuEventRecord(void* event, void*) {
  static_cast<Event*>(event)->store(false, std::memory_order_relaxed);
  g_gpu->queue([=] { static_cast<Event*>(event)->store(true, std::memory_order_release); });
  return 0;
}
int cuEventQuery(void* event) {
  return static_cast<Event*>(event)->load(std::memory_order_acquire) ? 0 : 600;
}
int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
int cuStreamIsCapturing(void*, int* status) { return *status = 0; }
int cuStreamWaitValue32_v2(void*, uint64_t, uint32_t, unsigned) { return 0; }
int cuCtxGetCurrent(void** context) {
  *context = &g_gpu;
  return 0;
}
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuGetErrorName(int, const char**) { return 1; }
int cuGetErrorString(int, const char**) { return 1; }
}

namespace {

using kt::sys::BoundLaunch;

constexpr const char* kThisProgram = "";  // as dlopen takes it

template <class T> uint64_t address(const T* p) { return reinterpret_cast<uint64_t>(p); }

// Experts move as the scores want it while the "GPU" counts routes. Every slot has its expert's
// bytes as soon as its upload counts as complete.
void moves() {
  Gpu gpu;
  g_gpu = &gpu;
  const kt::sys::CudaContext context(kThisProgram);
  std::vector<uint8_t> experts(kLayers * kExperts * kBytes), slots(kLayers * kSlots * kBytes);
  std::mt19937 random(1);
  for (auto& byte : experts) byte = uint8_t(random());
  std::vector<uint8_t> staged(kBytes);
  std::vector<int64_t> on_device(kLayers * kRow), on_host(kLayers * kRow);
  const kt::sys::SyncedCopies fetch(
      context, 1, {}, {{address(on_host.data()), address(on_device.data()), 8 * on_host.size()}});
  kt::sys::UploadQueue queue(context, 1);
  const kt::sys::KernelLaunch kernel(reinterpret_cast<uint64_t>(&write_slot), 32, 0, "pp",
                                     kThisProgram);
  std::vector<BoundLaunch> launches;
  for (int64_t slot = 0; slot < kLayers * kSlots; ++slot)
    launches.push_back(
        {&kernel, {1, 2, 3}, 0, {address(staged.data()), address(&slots[slot * kBytes])}, {}});

  kt::CacheScores scores({{3, 0.1}, {64, 1}}, {kSlots, kSlots}, kExperts);
  std::vector<uint8_t> resident(kLayers * kExperts), evictable(resident.size());
  std::vector<int64_t> held(kLayers * kSlots, -1);  // experts
  int64_t passed = 0;
  std::atomic<bool> stop{false};
  std::thread engine([&] {  // whose batches count, some uses of the first experts
    std::mt19937 routes(2);
    while (!stop) {
      gpu.queue([&, expert = int64_t(routes() % kExperts)] {
        for (int64_t layer = 0; layer < kLayers; ++layer) {
          on_device[layer * kRow + expert] += 1;
          on_device[layer * kRow + kExperts] += 1;
        }
        __atomic_fetch_add(&passed, 1, __ATOMIC_RELAXED);
      });
      gpu.synchronize();
    }
  });
  std::thread asks([&] {  // as another user of the queue
    while (!stop) queue.completed();
  });

  int64_t started = 0;
  while (started < 300) {
    fetch.run();
    const int64_t known = on_host[kExperts];
    scores.see(on_host.data());
    const std::vector<kt::CacheMove> wanted =
        scores.wanted({resident.data(), evictable.data(), {0, 0}}, 4, 64);
    std::vector<kt::sys::Upload> uploads;
    std::vector<std::pair<size_t, size_t>> arriving;  // slots and experts
    const auto upload = [&](int64_t layer, int64_t number, size_t slot) {
      const size_t expert = size_t(layer * kExperts + number);
      held[slot] = number;
      resident[expert] = evictable[expert] = 1;
      uploads.push_back({{{address(staged.data()), address(&experts[expert * kBytes]), kBytes}},
                         {&launches[slot]}});
      arriving.emplace_back(slot, expert);
    };
    for (const kt::CacheMove& move : wanted) {
      const auto begin = held.begin() + move.layer * kSlots;
      const auto place = std::find(begin, begin + kSlots, move.other);
      CHECK(place != begin + kSlots);
      const size_t other = size_t(move.layer * kExperts + move.other);
      resident[other] = evictable[other] = 0;
      upload(move.layer, move.expert, size_t(place - held.begin()));
    }
    if (held[0] < 0)  // nothing has a slot yet
      for (int64_t slot = 0; slot < kLayers * kSlots; ++slot)
        upload(slot / kSlots, slot % kSlots, size_t(slot));
    const int64_t before = started;
    started = queue.start(uploads);
    CHECK(started == before + int64_t(uploads.size()));
    for (int64_t done = before; done < started; done = queue.completed())
      kt::wait_for_news({&passed, known, &queue, done}, 1e-5, 1, 1);
    for (const auto& [slot, expert] : arriving)
      CHECK(std::equal(&slots[slot * kBytes], &slots[slot * kBytes] + kBytes,
                       &experts[expert * kBytes]));
    kt::wait_for_news({&passed, known, nullptr, 0}, 1e-5, 0, 1);
  }
  stop = true;
  engine.join();
  asks.join();
  queue.wait();
}

}  // namespace

int main() {
  moves();
  return g_failures == 0 ? 0 : 1;
}
