// Measures how many threads saturate this machine's read bandwidth.
#pragma once
#include <utility>
#include <vector>

namespace kt::sys {

// Reads memory larger than the last-level cache with 1, 2, 4, ... threads up to max_threads. Takes
// about half a second, and the time to fill the memory: 256 MiB or twice the cache, but at most a
// quarter of the available memory. Threads are distributed over the NUMA nodes and read their own
// node's memory. Returns (threads, bytes per second), in ascending order of threads. Throws
// std::invalid_argument for max_threads < 1, and what Mapping and Team::submit throw.
std::vector<std::pair<int, double>> probe_read_bandwidth(int max_threads);

}  // namespace kt::sys
