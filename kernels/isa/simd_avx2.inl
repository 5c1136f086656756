// Eight 32-bit lanes: AVX2, FMA, F16C. All kernels are written with the names defined here; each
// simd_*.inl defines the same names for its vector width. Included in an anonymous namespace.
using F = __m256;   // float lanes
using I = __m256i;  // int32 lanes (or the bytes of a step)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;

inline F f_zero() { return _mm256_setzero_ps(); }
inline F f_set(float x) { return _mm256_set1_ps(x); }
inline F f_load(const float* p) { return _mm256_loadu_ps(p); }
inline void f_store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline void f_stream(float* p, F x) { _mm256_stream_ps(p, x); }  // to an aligned p, past the caches
inline F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F f_fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
inline F f_add(F a, F b) { return _mm256_add_ps(a, b); }
inline F f_mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm256_div_ps(a, b); }
// If an operand is NaN, both return the second operand, so data is passed second.
inline F f_min(F a, F b) { return _mm256_min_ps(a, b); }
inline F f_max(F a, F b) { return _mm256_max_ps(a, b); }

inline I i_zero() { return _mm256_setzero_si256(); }
inline I i_set(int32_t x) { return _mm256_set1_epi32(x); }
inline I i_load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void i_store(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline I i_add(I a, I b) { return _mm256_add_epi32(a, b); }
inline I i_sub(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I i_sub8(I a, I b) { return _mm256_sub_epi8(a, b); }  // per byte
inline I i_and(I a, I b) { return _mm256_and_si256(a, b); }
inline I i_or(I a, I b) { return _mm256_or_si256(a, b); }
inline I i_xor(I a, I b) { return _mm256_xor_si256(a, b); }
inline I i_max(I a, I b) { return _mm256_max_epi32(a, b); }
template <int n> inline I i_sll(I a) { return _mm256_slli_epi32(a, n); }
template <int n> inline I i_srl(I a) { return _mm256_srli_epi32(a, n); }
template <int n> inline I i_sra(I a) { return _mm256_srai_epi32(a, n); }
template <int n> inline I i_sll16(I a) { return _mm256_slli_epi16(a, n); }  // 16-bit lanes
template <int n> inline I i_sra16(I a) { return _mm256_srai_epi16(a, n); }
template <int n> inline I i_srl16(I a) { return _mm256_srli_epi16(a, n); }
// table[i] for bytes i in 0..15
inline I i_lookup(__m128i table, I i) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), i);
}

inline F as_f(I x) { return _mm256_castsi256_ps(x); }
inline I as_i(F x) { return _mm256_castps_si256(x); }
inline F to_f(I x) { return _mm256_cvtepi32_ps(x); }
inline I round_i(F x) { return _mm256_cvtps_epi32(x); }  // to nearest, ties to even

inline int32_t max_lanes(I x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0b01001110));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0b10110001)));
}
inline int32_t sum_lanes(I x) {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0b01001110));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0b10110001)));
}

inline F f_load_fp16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void f_store_fp16(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, 0));
}
inline I i_load_u16(const uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I i_load_u8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline I i_load_i8(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline F f_set_pair(const float* p) {  // p[0], p[1], p[0], p[1], ...
  int64_t pair;
  __builtin_memcpy(&pair, p, 8);
  return as_f(_mm256_set1_epi64x(pair));
}
// Zero-extended to 16-bit lanes.
inline I i_load_u8_as_u16(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F f_pair_sums(F low, F high) {  // of neighbours: low[0] + low[1], low[2] + low[3], ...
  const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(low, high));
  return _mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0b11011000));
}
inline void i_store_u16(uint16_t* p, I x) {  // lanes in 0..65535
  const __m256i y = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(y));
}
inline void i_store_i16(int16_t* p, I low, I high) {  // lanes in -32768..32767
  i_store(p, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0b11011000));
}
inline void i_store_i8(int8_t* p, I x) {  // lanes in -128..127
  const __m256i y = _mm256_packs_epi16(_mm256_packs_epi32(x, x), i_zero());
  const int64_t lo = _mm_cvtsi128_si64(_mm256_castsi256_si128(y));
  const int64_t hi = _mm_cvtsi128_si64(_mm256_extracti128_si256(y, 1));
  const uint64_t both = uint64_t(uint32_t(lo)) | uint64_t(uint32_t(hi)) << 32;
  __builtin_memcpy(p, &both, 8);
}
inline void i_store_i8x32(int8_t* p, const I (&x)[4]) {
  const __m256i y =
      _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
  i_store(p, _mm256_permutevar8x32_epi32(y, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
inline F f_or_nan(F x, F test, F replacement) {  // replacement in the lanes where test is NaN
  return _mm256_blendv_ps(x, replacement, _mm256_cmp_ps(test, test, _CMP_UNORD_Q));
}

// Sums of four products per lane. maddubs adds two products in 16 bits and saturates, so int8 times
// int8 is computed as |w| * (a with w's sign), which is at most 2 * 127 * 127 = 32258.
constexpr bool kOffsetActivations = false;
struct Int8Weights {
  I magnitude, sign;
};
inline Int8Weights int8_weights(I w) { return {_mm256_abs_epi8(w), w}; }
inline I dot_int8(I acc, I a, Int8Weights w) {
  const I p = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(a, w.sign));
  return i_add(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
}
// Products of unsigned codes and int8 digits, accumulated in the fastest lanes. Here these are
// int16, pairs of k, so the caller must take a total before 8 products of codes up to 15
// (2 * 15 * 128 each), or 4 of codes up to 24, overflow.
constexpr bool kNarrowDots = true;
inline I dot_codes(I acc, I codes, I digits) {
  acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, digits));
  // GCC would postpone the additions of an unrolled loop and spill the products until then.
  asm("" : "+x"(acc));
  return acc;
}
inline I dot_total(I acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
inline I dot_total(I high, I low) {  // 256 * high + low
  return i_add(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), dot_total(low));
}
// Adds the products of 16-bit lanes in pairs. The assembly keeps the accumulator in one register.
inline I dot_pairs(I acc, I a, I b) {
  acc = i_add(acc, _mm256_madd_epi16(a, b));
  asm("" : "+x"(acc));
  return acc;
}
