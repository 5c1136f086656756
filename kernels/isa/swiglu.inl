// exp(x) for any x: 2^n * e^r with |r| <= ln2/2, by the Taylor polynomial of degree 7 (relative
// error under 3e-8). The power of two is applied in two factors, so that overflow gives infinity
// and underflow gives zero. The operations, and so the bits, are the same on every instruction set.
inline F exp_lanes(F x) {
  x = f_max(f_set(-104.0f), f_min(f_set(104.0f), x));
  const I n = round_i(f_mul(x, f_set(1.44269504f)));
  const F nf = to_f(n);
  F r = f_fnma(nf, f_set(0.693359375f), x);  // ln2 in two parts, of which the first is exact
  r = f_fnma(nf, f_set(-2.12194440e-4f), r);
  F p = f_set(1.0f / 5040);
  p = f_fma(p, r, f_set(1.0f / 720));
  p = f_fma(p, r, f_set(1.0f / 120));
  p = f_fma(p, r, f_set(1.0f / 24));
  p = f_fma(p, r, f_set(1.0f / 6));
  p = f_fma(p, r, f_set(0.5f));
  p = f_fma(p, r, f_set(1.0f));
  p = f_fma(p, r, f_set(1.0f));
  const I half = i_sra<1>(n);
  const F s1 = as_f(i_sll<23>(i_add(half, i_set(127))));
  const F s2 = as_f(i_sll<23>(i_add(i_sub(n, half), i_set(127))));
  return f_mul(f_mul(p, s1), s2);
}

// act(gate) * up of the layer (kernel_table.h, Activation). NaN in gate or up stays NaN.
inline F gated(F gate, F up, const Activation& act) {
  if (act.limit > 0) {
    gate = f_min(f_set(act.limit), gate);
    up = f_max(f_set(-act.limit), f_min(f_set(act.limit), up));
  }
  const F one = f_set(1.0f);
  const bool plain = act.alpha == 0;
  const F z = plain ? gate : f_mul(f_set(act.alpha), gate);
  const F activated = f_div(gate, f_add(one, exp_lanes(f_mul(z, f_set(-1.0f)))));
  return f_mul(activated, plain ? up : f_add(up, one));
}

void swiglu_tile(const float* gate, const float* up, const float* gate_bias, const float* up_bias,
                 const Activation& act, int64_t m, float* out) {
  for (int64_t r = 0; r < m; ++r)
    for (int n = 0; n < kTileRows; n += kLanes) {
      F g = f_load(gate + r * kTileRows + n), u = f_load(up + r * kTileRows + n);
      if (gate_bias) g = f_add(g, f_load(gate_bias + n));
      if (up_bias) u = f_add(u, f_load(up_bias + n));
      f_store(out + r * kTileRows + n, gated(g, u, act));
    }
}
