// Integer dot products of 4-bit steps.

// How nibbles become unsigned bytes, and how many steps (8 columns) of products dot_codes may add.
struct NibbleCodes {
  static constexpr int kMaxSteps = 4;
  static inline I codes(I nibbles) { return nibbles; }
};
struct E2m1Codes {
  static constexpr int kMaxSteps = kNarrowDots ? 2 : 4;
  static inline I codes(I nibbles) { return e2m1_codes(nibbles); }
};

// acc[r][v][d]: products of `steps` steps with activations of D digits, kActGroup bytes apart.
template <class Codes, int steps, int M, int V, int D>
inline void dot_steps(const uint8_t* w, const uint8_t* const (&x)[M], I (&acc)[M][V][D]) {
  for (auto& row : acc)
    for (auto& vector : row)
      for (I& digit : vector) digit = i_zero();
  const I mask = i_set(0x0f0f0f0f);
  for (int s = 0; s < steps; ++s, w += kStepBytes)
    for (int v = 0; v < V; ++v) {
      const I step = i_load(w + v * kLanes * 4);
      const I first = Codes::codes(i_and(step, mask));
      const I second = Codes::codes(i_and(i_srl<4>(step), mask));
      for (int r = 0; r < M; ++r)
        for (int d = 0; d < D; ++d) {
          const uint8_t* digits = x[r] + d * kActGroup + s * 8;
          acc[r][v][d] = dot_codes(acc[r][v][d], first, i_set(load_i32(digits)));
          acc[r][v][d] = dot_codes(acc[r][v][d], second, i_set(load_i32(digits + 4)));
        }
    }
}
