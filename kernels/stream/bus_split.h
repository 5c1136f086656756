// Divides a layer's experts between the CPU and the bus to a GPU.
#pragma once
#include <cstdint>
#include <vector>

namespace kt {

// How long the two sides take, in seconds.
struct BusRates {
  double expert_on_bus;  // to copy an expert, and to unpack it if that takes longer
  double expert_on_cpu;  // to read the weights of an expert that has tokens
  double token_on_cpu;   // to multiply one token with one expert, on top of that
  double streaming;      // what it costs to copy experts at all
};

struct BusSplit {
  std::vector<int64_t> streamed;  // experts to copy, the one with the most tokens first
  double seconds;                 // until both sides are finished
};

// The experts to copy to the GPU so that both sides finish as early as possible. tokens[e] is the
// number of tokens of expert e; an expert with none is never copied.
//
// Every expert takes the bus equally long, so the experts with the most tokens are copied: copying
// another one in the place of one of them would only leave more work to the CPU. Among experts with
// equally many tokens the first are copied, and among equally fast splits the smallest is taken.
//
// Throws std::invalid_argument for a negative number of tokens, and for a rate that is negative or
// not finite.
BusSplit split_over_bus(const std::vector<int64_t>& tokens, const BusRates& rates);

}  // namespace kt
