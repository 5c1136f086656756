#include "bus_split.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "../sys/need.h"

namespace kt {
namespace {

void check(const char* name, double rate) {
  need(std::isfinite(rate) && rate >= 0,
       std::string(name) + " " + std::to_string(rate) + "; a number of at least 0 is accepted");
}

}  // namespace

BusSplit split_over_bus(const std::vector<int64_t>& tokens, const BusRates& rates) {
  check("expert_on_bus", rates.expert_on_bus);
  check("expert_on_cpu", rates.expert_on_cpu);
  check("token_on_cpu", rates.token_on_cpu);
  check("streaming", rates.streaming);
  std::vector<int64_t> order;
  double left = 0;  // tokens of the experts that stay on the CPU
  for (size_t e = 0; e < tokens.size(); ++e) {
    need(tokens[e] >= 0, "expert " + std::to_string(e) + " has " + std::to_string(tokens[e]) +
                             " tokens; at least 0 is accepted");
    if (!tokens[e]) continue;
    order.push_back(int64_t(e));
    left += double(tokens[e]);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return tokens[size_t(a)] > tokens[size_t(b)]; });
  const auto experts = int64_t(order.size());
  const auto seconds = [&](int64_t streamed) {
    const double cpu = double(experts - streamed) * rates.expert_on_cpu + left * rates.token_on_cpu;
    return streamed ? std::max(cpu, double(streamed) * rates.expert_on_bus) + rates.streaming : cpu;
  };
  int64_t best = 0;
  double least = seconds(0);
  for (int64_t n = 1; n <= experts; ++n) {
    left -= double(tokens[size_t(order[size_t(n - 1)])]);
    if (const double now = seconds(n); now < least) least = now, best = n;
  }
  order.resize(size_t(best));
  return {std::move(order), least};
}

}  // namespace kt
