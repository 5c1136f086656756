// Sixteen 32-bit lanes: AVX-512 F, BW, DQ, VL, and VNNI if KT_VNNI is defined. Defines the same
// names as simd_avx2.inl. Included in an anonymous namespace.
using F = __m512;
using I = __m512i;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;

inline F f_zero() { return _mm512_setzero_ps(); }
inline F f_set(float x) { return _mm512_set1_ps(x); }
inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void f_stream(float* p, F x) {  // to an aligned p, past the caches
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_castps_si512(x));
}
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
// If an operand is NaN, both return the second operand, so data is passed second.
inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }

inline I i_zero() { return _mm512_setzero_si512(); }
inline I i_set(int32_t x) { return _mm512_set1_epi32(x); }
inline I i_load(const void* p) { return _mm512_loadu_si512(p); }
inline void i_store(void* p, I x) { _mm512_storeu_si512(p, x); }
inline I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I i_sub8(I a, I b) { return _mm512_sub_epi8(a, b); }  // per byte
inline I i_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I i_or(I a, I b) { return _mm512_or_si512(a, b); }
inline I i_xor(I a, I b) { return _mm512_xor_si512(a, b); }
inline I i_max(I a, I b) { return _mm512_max_epi32(a, b); }
template <int n> inline I i_sll(I a) { return _mm512_slli_epi32(a, n); }
template <int n> inline I i_srl(I a) { return _mm512_srli_epi32(a, n); }
template <int n> inline I i_sra(I a) { return _mm512_srai_epi32(a, n); }
template <int n> inline I i_sll16(I a) { return _mm512_slli_epi16(a, n); }  // 16-bit lanes
template <int n> inline I i_sra16(I a) { return _mm512_srai_epi16(a, n); }
template <int n> inline I i_srl16(I a) { return _mm512_srli_epi16(a, n); }
// table[i] for bytes i in 0..15
inline I i_lookup(__m128i table, I i) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), i);
}

inline F as_f(I x) { return _mm512_castsi512_ps(x); }
inline I as_i(F x) { return _mm512_castps_si512(x); }
inline F to_f(I x) { return _mm512_cvtepi32_ps(x); }
inline I round_i(F x) { return _mm512_cvtps_epi32(x); }  // to nearest, ties to even

inline int32_t max_lanes(I x) {
  __m256i y = _mm256_max_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  y = _mm256_max_epi32(y, _mm256_permute4x64_epi64(y, 0b01001110));
  y = _mm256_max_epi32(y, _mm256_shuffle_epi32(y, 0b01001110));
  y = _mm256_max_epi32(y, _mm256_shuffle_epi32(y, 0b10110001));
  return _mm256_cvtsi256_si32(y);
}
inline int32_t sum_lanes(I x) {
  __m256i y = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  y = _mm256_add_epi32(y, _mm256_permute4x64_epi64(y, 0b01001110));
  y = _mm256_add_epi32(y, _mm256_shuffle_epi32(y, 0b01001110));
  y = _mm256_add_epi32(y, _mm256_shuffle_epi32(y, 0b10110001));
  return _mm256_cvtsi256_si32(y);
}

inline F f_load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void f_store_fp16(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, 0));
}
inline I i_load_u16(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline I i_load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I i_load_i8(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F f_set_pair(const float* p) {  // p[0], p[1], p[0], p[1], ...
  int64_t pair;
  __builtin_memcpy(&pair, p, 8);
  return as_f(_mm512_set1_epi64(pair));
}
// Zero-extended to 16-bit lanes.
inline I i_load_u8_as_u16(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F f_pair_sums(F low, F high) {  // of neighbours: low[0] + low[1], low[2] + low[3], ...
  const F sums = f_add(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
  const I order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm512_permutexvar_ps(order, sums);
}
inline void i_store_u16(uint16_t* p, I x) {  // lanes in 0..65535
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
inline void i_store_i16(int16_t* p, I low, I high) {  // lanes in -32768..32767
  i_store_u16(reinterpret_cast<uint16_t*>(p), low);
  i_store_u16(reinterpret_cast<uint16_t*>(p) + kLanes, high);
}
inline void i_store_i8(int8_t* p, I x) {  // lanes in -128..127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
inline void i_store_i8x32(int8_t* p, const I (&x)[2]) {
  i_store_i8(p, x[0]);
  i_store_i8(p + kLanes, x[1]);
}
inline F f_or_nan(F x, F test, F replacement) {  // replacement in the lanes where test is NaN
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(test, test, _CMP_UNORD_Q), x, replacement);
}

#ifdef KT_VNNI
// dpbusd needs one unsigned operand: activations are offset by 128 (one xor), and the kernel
// subtracts 128 * sum(w) at the end.
constexpr bool kOffsetActivations = true;
struct Int8Weights {
  I w;
};
inline Int8Weights int8_weights(I w) { return {w}; }
inline I dot_int8(I acc, I a, Int8Weights w) { return _mm512_dpbusd_epi32(acc, a, w.w); }
// Products of unsigned codes and int8 digits, accumulated in the fastest lanes. Here these are
// int32.
constexpr bool kNarrowDots = false;
inline I dot_codes(I acc, I codes, I digits) { return _mm512_dpbusd_epi32(acc, codes, digits); }
inline I dot_total(I acc) { return acc; }
inline I dot_total(I high, I low) { return i_add(i_sll<8>(high), low); }
#else
// As in simd_avx2.inl: |w| * (a with w's sign) cannot saturate.
constexpr bool kOffsetActivations = false;
struct Int8Weights {
  I magnitude;
  __mmask64 negative;
};
inline Int8Weights int8_weights(I w) { return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)}; }
inline I dot_int8(I acc, I a, Int8Weights w) {
  const I signed_a = _mm512_mask_sub_epi8(a, w.negative, i_zero(), a);
  const I p = _mm512_maddubs_epi16(w.magnitude, signed_a);
  return i_add(acc, _mm512_madd_epi16(p, _mm512_set1_epi16(1)));
}
// As in simd_avx2.inl.
constexpr bool kNarrowDots = true;
inline I dot_codes(I acc, I codes, I digits) {
  acc = _mm512_add_epi16(acc, _mm512_maddubs_epi16(codes, digits));
#ifndef KT_EMULATE
  asm("" : "+v"(acc));
#endif
  return acc;
}
inline I dot_total(I acc) { return _mm512_madd_epi16(acc, _mm512_set1_epi16(1)); }
inline I dot_total(I high, I low) {
  return i_add(_mm512_madd_epi16(high, _mm512_set1_epi16(256)), dot_total(low));
}
#endif

// Adds the products of 16-bit lanes in pairs. The assembly keeps the accumulator in one register.
inline I dot_pairs(I acc, I a, I b) {
#ifdef KT_VNNI
  acc = _mm512_dpwssd_epi32(acc, a, b);
#else
  acc = i_add(acc, _mm512_madd_epi16(a, b));
#endif
#ifndef KT_EMULATE
  asm("" : "+v"(acc));
#endif
  return acc;
}
