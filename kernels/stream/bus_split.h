// Divides a layer's experts between the CPU and the bus to a GPU.
#pragma once
#include <cstdint>
#include <vector>

namespace kt {

// How long the two sides take, in seconds.
struct BusRates {
  double expert_on_bus;  // to copy an expert, and to unpack it if that takes longer
  double batch_on_cpu;   // to hand the batch over to the CPU, whatever it computes
  double streaming;      // what it costs to copy experts at all
};

struct BusSplit {
  std::vector<int64_t> streamed;  // experts to copy, the one that takes the CPU longest first
  double seconds;                 // until both sides are finished
};

// The experts to copy to the GPU so that both sides finish as early as possible. on_cpu[e] is the
// time in seconds that the CPU takes for expert e with its tokens; 0 if it has none, and it is
// never copied then.
//
// Every expert takes the bus equally long, so those are copied that take the CPU longest: copying
// another one in the place of one of them would only leave more work to the CPU. Among experts that
// take equally long the first are copied, and among equally fast splits the smallest is taken.
//
// Throws std::invalid_argument for a time that is negative or not finite.
BusSplit split_over_bus(const std::vector<double>& on_cpu, const BusRates& rates);

}  // namespace kt
