#include "sys/topology.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "sys/sysfs.h"

namespace kt::sys {
namespace {

namespace fs = std::filesystem;

// "node12" -> 12 for the prefix "node".
std::optional<int> numbered(const std::string& name, std::string_view prefix) {
  if (name.compare(0, prefix.size(), prefix) != 0) return std::nullopt;
  const auto number = parse_number(std::string_view(name).substr(prefix.size()));
  if (!number || *number > 65535) return std::nullopt;
  return static_cast<int>(*number);
}

// The lowest CPU in `among` (ascending) that shares a core with `cpu`.
int first_sibling(const std::string& root, int cpu, const std::vector<int>& among) {
  const std::string dir = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
  const auto text = read_text(dir + "thread_siblings_list");
  const auto siblings = text ? parse_list(*text) : std::nullopt;
  if (!siblings || !std::binary_search(siblings->begin(), siblings->end(), cpu)) return cpu;
  for (int sibling : *siblings) {
    if (std::binary_search(among.begin(), among.end(), sibling)) return sibling;
  }
  return cpu;
}

Node make_node(const std::string& root, int id, const std::vector<int>& cpus) {
  Node node{id, {}, 0};
  std::vector<int> rest;
  for (int cpu : cpus) {
    (first_sibling(root, cpu, cpus) == cpu ? node.cpus : rest).push_back(cpu);
  }
  node.cores = static_cast<int>(node.cpus.size());
  node.cpus.insert(node.cpus.end(), rest.begin(), rest.end());
  return node;
}

std::vector<Node> parse_override(const std::string& value) {
  const auto malformed = [&value](const std::string& why) {
    return std::invalid_argument("KT_TOPOLOGY=\"" + value + "\": " + why +
                                 "; expected node:cpus separated by ';', as in "
                                 "\"0:0,2;1:1,3\" or \"0:0-3;1:4-7\"");
  };
  std::vector<Node> nodes;
  std::set<int> used;
  std::string_view rest = value;
  for (bool more = true; more;) {
    const size_t semicolon = rest.find(';');
    more = semicolon != rest.npos;
    const std::string_view part = rest.substr(0, semicolon);
    if (more) rest.remove_prefix(semicolon + 1);
    const size_t colon = part.find(':');
    if (colon == part.npos) throw malformed("\"" + std::string(part) + "\" has no ':'");
    const auto id = parse_list(part.substr(0, colon));
    if (!id || id->size() != 1) throw malformed("\"" + std::string(part) + "\" has no node number");
    const auto cpus = parse_list(part.substr(colon + 1));
    if (!cpus || cpus->empty()) throw malformed("\"" + std::string(part) + "\" has no CPU list");
    for (int cpu : *cpus) {
      if (!used.insert(cpu).second) throw malformed("CPU " + std::to_string(cpu) + " twice");
    }
    nodes.push_back({id->front(), *cpus, static_cast<int>(cpus->size())});
  }
  std::sort(nodes.begin(), nodes.end(), [](const Node& a, const Node& b) { return a.id < b.id; });
  for (size_t i = 1; i < nodes.size(); ++i) {
    if (nodes[i].id == nodes[i - 1].id) {
      throw malformed("node " + std::to_string(nodes[i].id) + " twice");
    }
  }
  return nodes;
}

// ceil(quota / period), at least 1; kNoCpuQuota for "max", "-1" and anything that is not a number.
int quota_cpus(std::string_view quota, std::string_view period) {
  const auto q = parse_number(quota), p = parse_number(period);
  if (!q || !p || *q == 0 || *p == 0) return kNoCpuQuota;
  const long long cpus = *q / *p + (*q % *p != 0);
  return static_cast<int>(std::min<long long>(cpus, kNoCpuQuota));
}

int quota_of_group(const std::string& dir) {
  if (const auto max = read_text(dir + "/cpu.max")) {  // v2: "150000 100000" or "max 100000"
    const size_t space = max->find(' ');
    if (space == max->npos) return kNoCpuQuota;
    return quota_cpus(std::string_view(*max).substr(0, space),
                      std::string_view(*max).substr(space + 1));
  }
  const auto quota = read_text(dir + "/cpu.cfs_quota_us");  // v1: -1 without a limit
  const auto period = read_text(dir + "/cpu.cfs_period_us");
  return quota && period ? quota_cpus(*quota, *period) : kNoCpuQuota;
}

// The limits of outer groups apply, too. In a container, the path may be the host's, and nothing is
// mounted below it here. Those levels read as unlimited; the root of the mount has the limit.
int tightest_quota(const std::string& mount, std::string path) {
  int cpus = quota_of_group(mount);
  while (path.size() > 1) {
    cpus = std::min(cpus, quota_of_group(mount + path));
    path.erase(path.rfind('/'));
  }
  return cpus;
}

}  // namespace

std::vector<int> allowed_cpus() {
  // The kernel refuses a mask smaller than its own, which may exceed the 1024 bits of cpu_set_t.
  for (int bits = 1024; bits <= 65536; bits *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(bits),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const size_t bytes = CPU_ALLOC_SIZE(bits);
    if (!set) break;
    CPU_ZERO_S(bytes, set.get());
    if (sched_getaffinity(0, bytes, set.get()) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    std::vector<int> cpus;
    for (int cpu = 0; cpu < bits; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set.get())) cpus.push_back(cpu);
    }
    if (!cpus.empty()) return cpus;
    break;
  }
  std::vector<int> cpus;  // a sandbox forbids the query: assume all CPUs
  const int count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  for (int cpu = 0; cpu < count; ++cpu) cpus.push_back(cpu);
  return cpus;
}

std::vector<Node> topology_below(const std::string& root, const std::vector<int>& allowed) {
  std::vector<Node> nodes;
  std::error_code error;  // a missing or unreadable directory leaves `nodes` empty
  const fs::path dir = root + "/sys/devices/system/node";
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const auto id = numbered(it->path().filename().string(), "node");
    const auto text = id ? read_text(it->path().string() + "/cpulist") : std::nullopt;
    const auto listed = text ? parse_list(*text) : std::nullopt;
    if (!listed) continue;
    std::vector<int> cpus;
    std::set_intersection(listed->begin(), listed->end(), allowed.begin(), allowed.end(),
                          std::back_inserter(cpus));
    if (!cpus.empty()) nodes.push_back(make_node(root, *id, cpus));
  }
  if (nodes.empty()) nodes.push_back(make_node(root, 0, allowed));
  std::sort(nodes.begin(), nodes.end(), [](const Node& a, const Node& b) { return a.id < b.id; });
  return nodes;
}

std::vector<Node> topology() {
  const char* value = std::getenv("KT_TOPOLOGY");
  if (value && *value) return parse_override(value);
  return topology_below("", allowed_cpus());
}

int cpu_quota_below(const std::string& root) {
  const std::string mounts = root + "/sys/fs/cgroup";
  std::istringstream groups(read_text(root + "/proc/self/cgroup").value_or(""));
  int cpus = kNoCpuQuota;
  for (std::string line; std::getline(groups, line);) {  // "id:controllers:path"
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (path.empty() || path[0] != '/' || path.find("/..") != path.npos) continue;
    if (controllers.empty()) cpus = std::min(cpus, tightest_quota(mounts, path));  // v2
    if (("," + controllers + ",").find(",cpu,") != std::string::npos) {            // v1
      cpus = std::min(cpus, tightest_quota(mounts + "/cpu", path));
      cpus = std::min(cpus, tightest_quota(mounts + "/" + controllers, path));
    }
  }
  return cpus;
}

int cpu_quota() { return cpu_quota_below(""); }

int usable_cpus() { return std::min(static_cast<int>(allowed_cpus().size()), cpu_quota()); }

}  // namespace kt::sys
