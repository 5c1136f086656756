// The gradient of act(gate) * up (kt/training.h). Where a clamp is at work, the gradient of what
// was clamped is zero.

// x, or 0 in the lanes where y > limit.
inline F zero_above(F x, F y, F limit) {
  const I above = i_sra<31>(as_i(f_fnma(y, f_set(1), limit)));  // the sign of limit - y
  return as_f(i_and(as_i(x), i_xor(above, i_set(-1))));
}

struct Gated {
  F h, by_gate, by_up;  // and its derivatives
};
inline Gated gated_with_gradient(F gate, F up, const Activation& act) {
  const F one = f_set(1);
  const bool clamps = act.limit > 0, plain = act.alpha == 0;
  F g = gate, u = up;
  if (clamps) {
    g = f_min(f_set(act.limit), g);
    u = f_max(f_set(-act.limit), f_min(f_set(act.limit), u));
  }
  const F slope = plain ? one : f_set(act.alpha);
  const F z = plain ? g : f_mul(slope, g);
  const F sigmoid = f_div(one, f_add(one, exp_lanes(f_mul(z, f_set(-1)))));
  const F factor = plain ? u : f_add(u, one);
  const F activated = f_mul(g, sigmoid);
  // (g s(z))' = s + z s (1 - s)
  const F derivative = f_fma(f_mul(z, sigmoid), f_fnma(sigmoid, one, one), sigmoid);
  Gated result{f_mul(activated, factor), f_mul(derivative, factor), activated};
  if (clamps) {
    const F limit = f_set(act.limit);
    result.by_gate = zero_above(result.by_gate, gate, limit);
    result.by_up = zero_above(result.by_up, up, limit);
    result.by_up = zero_above(result.by_up, f_mul(up, f_set(-1)), limit);
  }
  return result;
}

// The sums of each vector's lanes, in ascending order.
inline F sums_of_lanes(F (&x)[kLanes]) {
  transpose(x);
  F sum = x[0];
  for (int i = 1; i < kLanes; ++i) sum = f_add(sum, x[i]);
  return sum;
}

void swiglu_backward_tile(const uint16_t* gate, const uint16_t* up, const float* v,
                          const float* weight, const Activation& act, int64_t m,
                          const SwigluGradients& out) {
  for (int64_t first = 0; first < m; first += kLanes) {
    const int64_t rows = m - first < kLanes ? m - first : kLanes;
    F dot[kLanes];
    for (int64_t r = first; r < first + rows; ++r) {
      const F w = f_set(weight[r]);
      F sum = f_zero();
      for (int64_t i = r * kTileRows; i < (r + 1) * kTileRows; i += kLanes) {
        const F of_h = f_load(v + i);
        const Gated at = gated_with_gradient(load_as_float(gate + i, DType::kBF16),
                                             load_as_float(up + i, DType::kBF16), act);
        const F weighted = f_mul(w, of_h);
        f_store(out.h + i, at.h);
        f_store(out.gate + i, f_mul(weighted, at.by_gate));
        f_store(out.up + i, f_mul(weighted, at.by_up));
        sum = f_fma(of_h, at.h, sum);
      }
      dot[r - first] = sum;
    }
    for (int64_t r = rows; r < kLanes; ++r) dot[r] = f_zero();
    store_some(out.dot + first, DType::kFP32, sums_of_lanes(dot), rows);
  }
}
