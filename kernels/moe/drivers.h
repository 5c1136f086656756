// The drivers of a forward pass. Each computes a chunk whose plan and rows of x exist.
#pragma once

namespace kt {

class Pass;
class Plan;
class XRows;
struct Chunk;

// For few (token, expert) pairs, where reading the weights takes most of the time.
void decode(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x);

// For many pairs, where multiplication takes most of the time.
void prefill(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x);

}  // namespace kt
