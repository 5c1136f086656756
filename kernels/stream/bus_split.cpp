#include "bus_split.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "../sys/need.h"

namespace kt {
namespace {

void check(const std::string& name, double seconds) {
  need(std::isfinite(seconds) && seconds >= 0,
       name + " " + std::to_string(seconds) + "; a number of at least 0 is accepted");
}

}  // namespace

BusSplit split_over_bus(const std::vector<double>& on_cpu, const BusRates& rates) {
  check("expert_on_bus", rates.expert_on_bus);
  check("batch_on_cpu", rates.batch_on_cpu);
  check("streaming", rates.streaming);
  std::vector<int64_t> order;
  for (size_t e = 0; e < on_cpu.size(); ++e) {
    check("on_cpu[" + std::to_string(e) + "]", on_cpu[e]);
    if (on_cpu[e] > 0) order.push_back(int64_t(e));
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return on_cpu[size_t(a)] > on_cpu[size_t(b)]; });
  // From all experts copied to none, so that the CPU's time is a sum of what stays there.
  const auto experts = int64_t(order.size());
  double cpu = 0, least = INFINITY;
  int64_t best = 0;
  for (int64_t n = experts; n >= 0; --n) {
    const double work = n < experts ? rates.batch_on_cpu + cpu : 0;
    const double now = n ? std::max(work, double(n) * rates.expert_on_bus) + rates.streaming : work;
    if (now <= least) least = now, best = n;
    if (n) cpu += on_cpu[size_t(order[size_t(n - 1)])];
  }
  order.resize(size_t(best));
  return {std::move(order), least};
}

}  // namespace kt
