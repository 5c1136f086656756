#include "sys/bandwidth.h"

#include <emmintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "sys/need.h"
#include "sys/numa_memory.h"
#include "sys/sysfs.h"
#include "sys/team.h"
#include "sys/topology.h"

namespace kt::sys {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kChunk = 256 * 1024;  // bytes read between two looks at the clock
constexpr size_t kMinBuffer = 256 * kMiB;
constexpr std::chrono::milliseconds kBudget{400};  // over all thread counts

// Total bytes of all caches of the highest level. sysfs has "32768K" for each set of CPUs that
// share one.
size_t last_level_cache() {
  std::map<std::pair<long long, std::string>, size_t> caches;  // (level, sharing CPUs) -> bytes
  for (int cpu : allowed_cpus()) {
    for (int index = 0;; ++index) {
      const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" +
                              std::to_string(index) + "/";
      const auto level = read_text(dir + "level"), size = read_text(dir + "size");
      if (!level || !size) break;
      if (size->empty() || size->back() != 'K') continue;
      const auto kib = parse_number(std::string_view(*size).substr(0, size->size() - 1));
      const auto number = parse_number(*level);
      if (!kib || !number) continue;
      const std::string shared = read_text(dir + "shared_cpu_list").value_or("");
      caches[{*number, shared}] = static_cast<size_t>(*kib) * 1024;
    }
  }
  size_t sum = 0;
  for (const auto& [key, bytes] : caches) {
    if (key.first == caches.rbegin()->first.first) sum += bytes;
  }
  return sum;
}

size_t available_memory() {
  std::istringstream lines(read_text("/proc/meminfo").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key;
    size_t kib = 0;
    if (words >> key >> kib && key == "MemAvailable:") return kib * 1024;
  }
  return 1024 * kMiB;  // unknown: the usual buffer is a quarter of this
}

// 16-byte loads (the baseline has no wider ones) are still faster than any core's memory.
__m128i read(const uint8_t* data, size_t bytes) {
  const __m128i* p = reinterpret_cast<const __m128i*>(data);
  __m128i a = _mm_setzero_si128(), b = a, c = a, d = a;  // hide the latency of the additions
  for (const __m128i* end = p + bytes / sizeof(__m128i); p != end; p += 4) {
    a = _mm_add_epi64(a, _mm_load_si128(p));
    b = _mm_add_epi64(b, _mm_load_si128(p + 1));
    c = _mm_add_epi64(c, _mm_load_si128(p + 2));
    d = _mm_add_epi64(d, _mm_load_si128(p + 3));
  }
  return _mm_add_epi64(_mm_add_epi64(a, b), _mm_add_epi64(c, d));
}

// One worker's part of its pool's buffer, in whole chunks.
struct Slice {
  uint8_t* data;
  size_t bytes;
};

Slice slice_of(const std::vector<Mapping>& buffers, const Worker& worker) {
  const Mapping& buffer = buffers[static_cast<size_t>(worker.pool)];
  const size_t chunks = buffer.size() / kChunk;
  const size_t first =
      chunks * static_cast<size_t>(worker.index) / static_cast<size_t>(worker.pool_threads);
  const size_t last =
      chunks * static_cast<size_t>(worker.index + 1) / static_cast<size_t>(worker.pool_threads);
  return {buffer.data() + first * kChunk, (last - first) * kChunk};
}

// Untouched pages would all map to the one zero page, and be read from the cache.
class Fill final : public Job {
 public:
  explicit Fill(const std::vector<Mapping>& buffers) : buffers_(buffers) {}
  void run(Worker& worker) noexcept override {
    const Slice slice = slice_of(buffers_, worker);
    std::memset(slice.data, 1, slice.bytes);
  }

 private:
  const std::vector<Mapping>& buffers_;
};

class Read final : public Job {
 public:
  Read(const std::vector<Mapping>& buffers, Clock::duration time)
      : buffers_(buffers), time_(time) {}

  void run(Worker& worker) noexcept override {
    const Slice slice = slice_of(buffers_, worker);
    worker.team_barrier();  // start together
    const auto begin = Clock::now();
    size_t bytes = 0;
    __m128i sum = _mm_setzero_si128();
    auto now = begin;
    while (slice.bytes && now - begin < time_) {
      sum = _mm_add_epi64(sum, read(slice.data + bytes % slice.bytes, kChunk));
      bytes += kChunk;
      now = Clock::now();
    }
    // Each thread uses its own clock, so one that was preempted at the end counts what it did.
    const double seconds = std::chrono::duration<double>(now - begin).count();
    // relaxed: the caller reads both after wait(). The sum keeps the loads from being optimised
    // out.
    const double rate = seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
    rate_.fetch_add(rate, std::memory_order_relaxed);
    sum_.fetch_add(_mm_cvtsi128_si64(sum), std::memory_order_relaxed);
  }

  double rate() const { return rate_.load(std::memory_order_relaxed); }

 private:
  const std::vector<Mapping>& buffers_;
  const Clock::duration time_;
  std::atomic<double> rate_{0.0};
  std::atomic<long long> sum_{0};
};

void run_on_team(const std::vector<Node>& nodes, int threads, std::shared_ptr<Job> job) {
  const int count = static_cast<int>(nodes.size());
  std::vector<PoolSpec> pools;
  for (int i = 0; i < count; ++i) {
    pools.push_back({threads / count + (i < threads % count), nodes[static_cast<size_t>(i)].id});
  }
  Team team(std::move(pools));
  team.submit(job);
  job->wait();
}

}  // namespace

std::vector<std::pair<int, double>> probe_read_bandwidth(int max_threads) {
  need(max_threads >= 1 && max_threads <= kMaxThreads,
       "max_threads = " + std::to_string(max_threads) + "; accepted: 1 to " +
           std::to_string(kMaxThreads));
  std::vector<int> counts;
  for (int threads = 1; threads < max_threads; threads *= 2) counts.push_back(threads);
  counts.push_back(max_threads);

  const std::vector<Node> nodes = topology();
  // Twice the cache if that much memory is free, but at least the minimum: a virtual machine whose
  // memory grows on demand may report none as available.
  const size_t total =
      std::max(kMinBuffer, std::min(2 * last_level_cache(), available_memory() / 4));
  std::vector<Mapping> buffers;
  for (const Node& node : nodes) buffers.emplace_back(total / nodes.size(), node.id);
  // At least one thread per node, to touch its memory there.
  run_on_team(nodes, std::max(max_threads, static_cast<int>(nodes.size())),
              std::make_shared<Fill>(buffers));

  std::vector<std::pair<int, double>> result;
  const auto time = Clock::duration(kBudget) / counts.size();
  for (int threads : counts) {
    const auto job = std::make_shared<Read>(buffers, time);
    run_on_team(nodes, threads, job);
    result.emplace_back(threads, job->rate());
  }
  return result;
}

}  // namespace kt::sys
