// NUMA nodes and cores that this process may use: sysfs, the affinity mask and the cgroup quota.
#pragma once
#include <string>
#include <vector>

namespace kt::sys {

struct Node {
  int id;                 // as in /sys/devices/system/node
  std::vector<int> cpus;  // allowed logical CPUs, one SMT sibling of each core first
  int cores;              // how many of `cpus` are first siblings
};

// Nodes with at least one allowed CPU, ascending. Without sysfs, there is one node 0 with the CPUs
// of the affinity mask. KT_TOPOLOGY="0:0,2;1:1,3" replaces all of this (for tests): the result is
// exactly the value's, with each CPU as a core, whether or not this machine has such CPUs and
// nodes. Ranges ("0:0-3") are allowed, and an empty value counts as unset. Throws
// std::invalid_argument for a malformed value.
std::vector<Node> topology();

// The number of CPUs that the cgroups of this process allow (the tightest limit of all levels,
// rounded up), or kNoCpuQuota without a limit.
int cpu_quota();
inline constexpr int kNoCpuQuota = 1 << 20;

std::vector<int> allowed_cpus();  // the calling thread's affinity mask, ascending, never empty
int usable_cpus();                // how many of these the quota allows

// As topology(), below another root directory and without KT_TOPOLOGY (for tests).
std::vector<Node> topology_below(const std::string& root, const std::vector<int>& allowed);
int cpu_quota_below(const std::string& root);

}  // namespace kt::sys
