// The drivers of a forward pass. Each computes a chunk whose plan and rows of x exist.
#pragma once

namespace kt {

class Pass;
class Plan;
class XRows;
struct Chunk;

// For few pairs of token and expert: reading the weights dominates.
void decode(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x);

// For many pairs: multiplication dominates.
void prefill(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x);

}  // namespace kt
