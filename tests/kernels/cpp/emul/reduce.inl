// Reductions over all lanes.
template <class T, class F>
[[maybe_unused]] static void reduce(const uint8_t* from, Output& out, F f) {
  T v[16];
  memcpy(v, from, sizeof v);
  for (int n = 8; n; n /= 2)  // which operand comes first matters when one is a NaN
    for (int i = 0; i < n; ++i) v[i] = n >= 4 ? f(v[i + n], v[i]) : f(v[i], v[i + n]);
  set<T>(out, 0, v[0]);
}
#define REDUCE(kind, name, operand, T, ...)                             \
  CASE(kF512, kind, reduce_##name, OUT(_mm512_reduce_##name(operand))); \
  SCALAR(reduce_##name, reduce<T>(in.a, out, [](T x, T y) -> T { return __VA_ARGS__; }))
REDUCE(kFloats, add_ps, FA, float, x + y);
REDUCE(kFloats, max_ps, FA, float, x > y ? x : y);
REDUCE(kBits, add_epi32, A, uint32_t, x + y);
