// Prints what kernels/sys reports for this machine, or for a directory laid out like one;
// test_sys.py compares it. For bad input, prints the message to stderr; the exit code is then 2.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "sys/bandwidth.h"
#include "sys/cpu_features.h"
#include "sys/numa_memory.h"
#include "sys/sysfs.h"
#include "sys/topology.h"

namespace {

using namespace kt::sys;

void print(const std::vector<Node>& nodes) {  // "0 2: 0 2 1 3": id, cores, CPUs
  for (const Node& node : nodes) {
    std::printf("%d %d:", node.id, node.cores);
    for (int cpu : node.cpus) std::printf(" %d", cpu);
    std::puts("");
  }
}

bool zero(const Mapping& m) {
  for (size_t i = 0; i < m.size(); ++i) {
    if (m.data()[i] != 0) return false;
  }
  return true;
}

bool refused(size_t bytes) {
  try {
    Mapping mapping(bytes);
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

int check_mappings() {
  int failures = 0;
  const auto check = [&failures](bool good, const char* what, size_t bytes) {
    if (!good) std::printf("%s: %zu bytes\n", what, bytes);
    failures += !good;
  };
  const size_t huge = size_t{2} << 20;
  for (size_t bytes : {size_t{1}, size_t{4096}, huge - 1, huge, huge + 1, 3 * huge + 4097}) {
    for (int node : {-1, 0, 1, 1000}) {
      Mapping m(bytes, node);
      const auto address = reinterpret_cast<uintptr_t>(m.data());
      check(m.size() == bytes, "size", bytes);
      check(address % (bytes >= huge ? huge : 4096) == 0, "alignment", bytes);
      check(zero(m), "zeros", bytes);
      std::memset(m.data(), 0xab, bytes);
      uint8_t* const data = m.data();
      Mapping moved(std::move(m));
      check(m.data() == nullptr && m.size() == 0, "moved from", bytes);
      Mapping assigned(10);
      assigned = std::move(moved);
      check(assigned.data() == data && assigned.size() == bytes, "assigned", bytes);
      check(moved.data() == nullptr, "assigned from", bytes);
      check(assigned.data()[bytes - 1] == 0xab, "contents", bytes);
    }
  }
  check(Mapping(0).data() == nullptr, "empty", 0);
  const size_t max = std::numeric_limits<size_t>::max();
  for (size_t bytes : {max, max - 4095, max - 2 * huge, max / 2, size_t{1} << 60}) {
    check(refused(bytes), "not refused", bytes);
  }
  return failures;
}

int run(const std::string& command, const std::vector<std::string>& args) {
  if (command == "topology") {
    print(topology());
  } else if (command == "topology_below") {  // root, allowed CPUs
    print(topology_below(args.at(0), parse_list(args.at(1)).value()));
  } else if (command == "quota") {
    std::printf("%d\n", cpu_quota());
  } else if (command == "quota_below") {
    std::printf("%d\n", cpu_quota_below(args.at(0)));
  } else if (command == "allowed") {
    for (int cpu : allowed_cpus()) std::printf("%d ", cpu);
  } else if (command == "features") {
    std::printf("%u %u\n%s\n", cpu_features(), cpu_features(), cpu_brand().c_str());
  } else if (command == "mappings") {
    return check_mappings() ? 1 : 0;
  } else if (command == "bandwidth") {
    for (const auto& [threads, rate] : probe_read_bandwidth(std::stoi(args.at(0)))) {
      std::printf("%d %.4g\n", threads, rate);
    }
  } else {
    std::fprintf(stderr, "unknown command %s\n", command.c_str());
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> args(argv + std::min(argc, 2), argv + argc);
    return run(argc > 1 ? argv[1] : "", args);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
