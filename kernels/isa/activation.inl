// e^x = 2^n * e^r with |r| <= ln2/2, and e^r = 1 + r + r^2 * terms by the Taylor polynomial of
// degree 7 (relative error under 3e-8). The operations, and so the bits, are the same on every
// instruction set.
struct Exponential {
  I n;
  F r, terms;
};
inline Exponential exponential(F x) {
  const I n = round_i(f_mul(x, f_set(1.44269504f)));
  const F nf = to_f(n);
  F r = f_fnma(nf, f_set(0.693359375f), x);  // ln2 in two parts, of which the first is exact
  r = f_fnma(nf, f_set(-2.12194440e-4f), r);
  F p = f_set(1.0f / 5040);
  p = f_fma(p, r, f_set(1.0f / 720));
  p = f_fma(p, r, f_set(1.0f / 120));
  p = f_fma(p, r, f_set(1.0f / 24));
  p = f_fma(p, r, f_set(1.0f / 6));
  return {n, r, f_fma(p, r, f_set(0.5f))};
}

// exp(x) for any x. The power of two is applied in two factors, so that overflow gives infinity and
// underflow gives zero.
inline F exp_lanes(F x) {
  const auto [n, r, terms] = exponential(f_max(f_set(-104.0f), f_min(f_set(104.0f), x)));
  F p = f_fma(terms, r, f_set(1.0f));
  p = f_fma(p, r, f_set(1.0f));
  const I half = i_sra<1>(n);
  const F s1 = as_f(i_sll<23>(i_add(half, i_set(127))));
  const F s2 = as_f(i_sll<23>(i_add(i_sub(n, half), i_set(127))));
  return f_mul(f_mul(p, s1), s2);
}

inline F with_sign_of(F x, F magnitude) {
  return as_f(i_or(as_i(magnitude), i_and(as_i(x), i_set(int32_t(0x80000000u)))));
}
inline F absolute(F x) { return as_f(i_and(as_i(x), i_set(0x7fffffff))); }

// tanh(x), by e^(2 |x|) - 1, which has no cancellation near 0. It is 1 in float32 from 10 on.
inline F tanh_lanes(F x) {
  const F z = f_min(f_set(10.0f), absolute(x));
  const auto [n, r, terms] = exponential(f_add(z, z));
  const F power = as_f(i_sll<23>(i_add(n, i_set(127))));
  const F less_1 = f_fma(power, f_fma(f_mul(r, r), terms, r), f_add(power, f_set(-1.0f)));
  return with_sign_of(x, f_div(less_1, f_add(less_1, f_set(2.0f))));
}

inline F clamped(F x, float limit) { return f_max(f_set(-limit), f_min(f_set(limit), x)); }

// SwiGLU (kernel_table.h, Activation). NaN in gate or up stays NaN.
inline F gated(F gate, F up, const Activation& act) {
  if (act.limit > 0) {
    gate = f_min(f_set(act.limit), gate);
    up = clamped(up, act.limit);
  }
  const F one = f_set(1.0f);
  const bool plain = act.alpha == 0;
  const F z = plain ? gate : f_mul(f_set(act.alpha), gate);
  const F activated = f_div(gate, f_add(one, exp_lanes(f_mul(z, f_set(-1.0f)))));
  return f_mul(activated, plain ? up : f_add(up, one));
}

// The standard normal distribution function P(X < x). The upper tail P(X > z), z = |x|, is
// exp(-z^2 / 2) * t * p(t) with t = 1 / (1 + 0.265 z). p is the polynomial of degree 8 with the
// least relative error for z up to 15, 2e-8; past that, float32 rounds the tail to zero.
inline F normal_cdf(F x) {
  constexpr float kTail[] = {0.10573931783437729f, 0.10528551787137985f,  0.10241813212633133f,
                             0.06144451722502708f, 0.13522887229919434f,  -0.11231141537427902f,
                             0.21417339146137238f, -0.14241552352905273f, 0.030437175184488297f};
  const F one = f_set(1.0f);
  const F z = f_min(f_set(15.0f), absolute(x));
  const F t = f_div(one, f_fma(f_set(0.265f), z, one));
  F p = f_set(kTail[8]);
  for (int i = 7; i >= 0; --i) p = f_fma(p, t, f_set(kTail[i]));
  const F upper = f_mul(f_mul(p, t), exp_lanes(f_mul(f_mul(z, z), f_set(-0.5f))));
  const I positive = as_i(f_fnma(upper, one, one)), negative = as_i(upper);
  return as_f(i_xor(positive, i_and(i_xor(positive, negative), i_sra<31>(as_i(x)))));
}

// The functions of kernel_table.h, ActFunction, of one value. NaN stays NaN.
inline F silu(F x) { return f_div(x, f_add(f_set(1.0f), exp_lanes(f_mul(x, f_set(-1.0f))))); }
inline F gelu(F x) { return f_mul(x, normal_cdf(x)); }
// (1 + tanh(y)) / 2 is the sigmoid of 2 y.
inline F gelu_tanh(F x) {
  const F cubic = f_fma(f_mul(x, x), f_set(0.044715f), f_set(1.0f));
  const F z = f_mul(f_mul(x, f_set(-1.5957691216f)), cubic);  // -2 sqrt(2 / pi)
  return f_div(x, f_add(f_set(1.0f), exp_lanes(z)));
}
inline F relu2(F x) {
  const F positive = f_max(f_zero(), x);
  return f_mul(positive, positive);
}

inline F soft_clamp(F x, float beta) {
  return f_mul(f_set(beta), tanh_lanes(f_div(x, f_set(beta))));
}
inline F situ(F gate, F up, const Activation& act) {
  const F one = f_set(1.0f);
  const F sigmoid = f_div(one, f_add(one, exp_lanes(f_mul(gate, f_set(-1.0f)))));
  const F factor = act.situ_linear_beta > 0 ? soft_clamp(up, act.situ_linear_beta) : up;
  return f_mul(f_mul(soft_clamp(gate, act.situ_beta), sigmoid), factor);
}
inline F swiglu_step(F gate, F up, float limit) {
  if (limit > 0) return f_mul(f_min(f_set(limit), silu(gate)), clamped(up, limit));
  return f_mul(silu(gate), up);
}

// The arguments of activate_tile.
struct ActivationTile {
  const float *gate, *up, *gate_bias, *up_bias, *weight;
  int64_t m;
  float* out;
};

inline F with_bias(F x, const float* bias, int n) { return bias ? f_add(x, f_load(bias + n)) : x; }

// out = h(gate, up), or h(up) if the tile has no gate.
template <bool gate, class Function>
inline void each_value(const ActivationTile& tile, Function h) {
  for (int64_t r = 0; r < tile.m; ++r)
    for (int n = 0; n < kTileRows; n += kLanes) {
      const int64_t at = r * kTileRows + n;
      const auto value = [&](const float* product, const float* bias) {
        const F x = f_load(product + at);
        return with_bias(tile.weight ? f_mul(x, f_set(tile.weight[r])) : x, bias, n);
      };
      const F u = value(tile.up, tile.up_bias);
      if constexpr (gate)
        f_store(tile.out + at, h(value(tile.gate, tile.gate_bias), u));
      else
        f_store(tile.out + at, h(u));
    }
}

template <class Function> inline void each_value_of(const ActivationTile& tile, Function f) {
  if (tile.gate)
    each_value<true>(tile, [&](F g, F u) { return f_mul(f(g), u); });
  else
    each_value<false>(tile, f);
}

void activate_tile(const float* gate, const float* up, const float* gate_bias, const float* up_bias,
                   const float* weight, const Activation& act, int64_t m, float* out) {
  const ActivationTile tile{gate, up, gate_bias, up_bias, weight, m, out};
  switch (act.function) {
    case ActFunction::kSilu:
      if (gate) return each_value<true>(tile, [&](F g, F u) { return gated(g, u, act); });
      return each_value<false>(tile, silu);
    case ActFunction::kGelu: return each_value_of(tile, gelu);
    case ActFunction::kGeluTanh: return each_value_of(tile, gelu_tanh);
    case ActFunction::kRelu2: return each_value_of(tile, relu2);
    case ActFunction::kSitu:
      return each_value<true>(tile, [&](F g, F u) { return situ(g, u, act); });
    case ActFunction::kSwigluStep:
      return each_value<true>(tile, [&](F g, F u) { return swiglu_step(g, u, act.limit); });
  }
}
