// Integer dot products of packed codes with activations in int8 digits. Codes are processed in
// quads: four columns of a row, in the four bytes of its lane. 32 columns are eight quads.

// ---- Codes to unsigned bytes: quad<c>(w) of the kSteps steps of 32 columns at w. kMost is the
// largest possible byte. kCodeOffset is the difference between bytes and the values of codes, if it
// is the same in all formats with such codes.
template <int bits> struct PlaneCodes {
  static constexpr int kSteps = bits, kMost = (1 << bits) - 1, kCodeOffset = 0;
  template <int c> static inline I quad(const uint8_t* w) { return part_quad<bits, c>(w, 0); }
};
using NibbleCodes = PlaneCodes<4>;
struct E2m1Codes {
  static constexpr int kSteps = 4, kMost = 24, kCodeOffset = kE2m1Offset;
  template <int c> static inline I quad(const uint8_t* w) {
    return e2m1_codes(part_quad<4, c>(w, 0));
  }
};
struct Iq4Codes {
  static constexpr int kSteps = 4, kMost = 241, kCodeOffset = kIq4Offset;
  template <int c> static inline I quad(const uint8_t* w) {
    return iq4_codes(part_quad<4, c>(w, 0));
  }
};
struct SignedByteCodes {
  static constexpr int kSteps = 8, kMost = 255, kCodeOffset = 128;
  template <int c> static inline I quad(const uint8_t* w) {
    return i_xor(part_quad<8, c>(w, 0), i_set(int32_t(0x80808080)));
  }
};

// ---- Products. If dot_codes adds in 16 bits, the sums of a few products are widened before they
// overflow. Digits are -128 at least, and each sum adds pairs of columns.
constexpr bool fits_narrow(int quads, int most) { return quads * 2 * most * 128 <= 32768; }
// Codes of more than 6 bits would overflow even in a single quad. They become 16-bit lanes, and the
// digits of 32 columns become the numbers that they represent (pair_digits): even columns, then
// odd.
template <class Codes> constexpr bool kPairs = kNarrowDots && !fits_narrow(1, Codes::kMost);

template <class Codes> constexpr int quads_at_once(int quads) {
  if (kNarrowDots && !kPairs<Codes>)
    while (!fits_narrow(quads, Codes::kMost)) quads /= 2;
  return quads;
}

inline void pair_digits(const uint8_t* digits, uint8_t* pairs) {
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(digits));
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(digits + kActGroup));
  const __m256i upper = _mm256_set1_epi16(int16_t(0xff00));
  const __m256i even =
      _mm256_add_epi16(_mm256_slli_epi16(high, 8), _mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8));
  const __m256i odd = _mm256_add_epi16(_mm256_and_si256(high, upper), _mm256_srai_epi16(low, 8));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs), even);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + kActGroup), odd);
}

// Adds the products of a quad with D digits of its activations, which are kActGroup bytes apart.
template <class Codes, int D> inline void dot_quad(I codes, const uint8_t* x, I (&acc)[D]) {
  for (int d = 0; d < D; ++d) {
    const I digits = i_set(load_i32(x + d * kActGroup));
    if constexpr (kPairs<Codes>) {
      const I lanes = d == 0 ? i_and(codes, i_set(0x00ff00ff)) : i_srl16<8>(codes);
      acc[d] = dot_pairs(acc[d], lanes, digits);
    } else {
      acc[d] = dot_codes(acc[d], codes, digits);
    }
  }
}
// Combines the sums of both digits.
template <class Codes> inline I digits_total(const I (&acc)[2]) {
  if constexpr (kPairs<Codes>)
    return i_add(acc[0], acc[1]);
  else
    return dot_total(acc[0], acc[1]);
}

// Adds to acc[r][v][d] the products of quads [c, end) of the 32 columns at w and x.
template <class Codes, int c, int end, int M, int V, int D>
[[gnu::always_inline]] inline void dot_quads(const uint8_t* w, const uint8_t* const (&x)[M],
                                             I (&acc)[M][V][D]) {
  if constexpr (c < end) {
    for (int v = 0; v < V; ++v) {
      const I codes = Codes::template quad<c>(w + v * kLanes * 4);
      for (int r = 0; r < M; ++r) dot_quad<Codes>(codes, x[r] + c * 4, acc[r][v]);
    }
    dot_quads<Codes, c + 1, end>(w, x, acc);
  }
}

template <int M, int V, int D> inline void zero_sums(I (&acc)[M][V][D]) {
  for (auto& row : acc)
    for (auto& vector : row)
      for (I& digit : vector) digit = i_zero();
}
