// The drivers of a forward pass: each computes a chunk whose plan and rows of x are made.
#pragma once

namespace kt {

class Pass;
class Plan;
class XRows;
struct Chunk;

// Few pairs of token and expert: reading the weights is what takes the time.
void decode(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x);

// Many pairs: multiplying is.
void prefill(Pass& pass, const Chunk& chunk, const Plan& plan, const XRows& x);

}  // namespace kt
