// Comparisons into masks.
#define COMPARE(suffix, MT, T, n)                                                          \
  COMPARE_ONE(suffix, eq, MT, T, n, x == y);                                               \
  COMPARE_ONE(suffix, neq, MT, T, n, x != y);                                              \
  COMPARE_ONE(suffix, lt, MT, T, n, x < y);                                                \
  COMPARE_ONE(suffix, le, MT, T, n, x <= y);                                               \
  COMPARE_ONE(suffix, ge, MT, T, n, x >= y);                                               \
  COMPARE_ONE(suffix, gt, MT, T, n, x > y);                                                \
  CASE(kF512, kBits, cmp_##suffix##_mask, OUT(_mm512_cmp_##suffix##_mask(A, B, 2)));       \
  SCALAR(cmp_##suffix##_mask, MASK(MT, T, n, x <= y));                                     \
  CASE(kF512, kBits, cmp_false_##suffix##_mask, OUT(_mm512_cmp_##suffix##_mask(A, B, 3))); \
  SCALAR(cmp_false_##suffix##_mask, set<MT>(out, 0, in.k != in.k));                        \
  CASE(kF512, kBits, cmp_true_##suffix##_mask, OUT(_mm512_cmp_##suffix##_mask(A, B, 7)));  \
  SCALAR(cmp_true_##suffix##_mask, set<MT>(out, 0, static_cast<MT>(in.k == in.k ? ~0ull : 0)))
#define COMPARE_ONE(suffix, op, MT, T, n, ...)                                                \
  CASE(kF512, kBits, cmp##op##_##suffix##_mask, OUT(_mm512_cmp##op##_##suffix##_mask(A, B))); \
  SCALAR(cmp##op##_##suffix##_mask, MASK(MT, T, n, __VA_ARGS__))
COMPARE(epi8, uint64_t, int8_t, 64);
COMPARE(epu8, uint64_t, uint8_t, 64);
COMPARE(epi16, uint32_t, int16_t, 32);
COMPARE(epu16, uint32_t, uint16_t, 32);
COMPARE(epi32, uint16_t, int32_t, 16);
COMPARE(epu32, uint16_t, uint32_t, 16);
#define COMPARE_PS(predicate, ...)                                                        \
  CASE(kF512, kBits, cmp_ps_mask##predicate, OUT(_mm512_cmp_ps_mask(FA, FB, predicate))); \
  SCALAR(cmp_ps_mask##predicate, MASK(uint16_t, float, 16, __VA_ARGS__))
#define NANS (std::isnan(x) || std::isnan(y))
// clang-format off
COMPARE_PS(_CMP_EQ_OQ, x == y); COMPARE_PS(_CMP_LT_OS, x < y); COMPARE_PS(_CMP_LE_OS, x <= y);
COMPARE_PS(_CMP_UNORD_Q, NANS); COMPARE_PS(_CMP_NEQ_UQ, !(x == y));
COMPARE_PS(_CMP_NLT_US, !(x < y)); COMPARE_PS(_CMP_NLE_US, !(x <= y));
COMPARE_PS(_CMP_ORD_Q, !NANS); COMPARE_PS(_CMP_EQ_UQ, NANS || x == y);
COMPARE_PS(_CMP_NGE_US, !(x >= y)); COMPARE_PS(_CMP_NGT_US, !(x > y));
COMPARE_PS(_CMP_FALSE_OQ, x != x && y == y && false); COMPARE_PS(_CMP_NEQ_OQ, !NANS && x != y);
COMPARE_PS(_CMP_GE_OS, x >= y); COMPARE_PS(_CMP_GT_OS, x > y);
COMPARE_PS(_CMP_TRUE_UQ, x == x || true); COMPARE_PS(_CMP_LT_OQ, x < y);
COMPARE_PS(_CMP_GT_OQ, x > y); COMPARE_PS(_CMP_EQ_OS, x == y);
// clang-format on
#define COMPARE_PS_NAMED(name, ...)                     \
  CASE(kF512, kBits, name, OUT(_mm512_##name(FA, FB))); \
  SCALAR(name, MASK(uint16_t, float, 16, __VA_ARGS__))
COMPARE_PS_NAMED(cmpeq_ps_mask, x == y);
COMPARE_PS_NAMED(cmplt_ps_mask, x < y);
CASE(kF512, kBits, test_epi16_mask, OUT(_mm512_test_epi16_mask(A, B)));
CASE(kF512, kBits, mask_test_epi16_mask,
     OUT(_mm512_mask_test_epi16_mask(static_cast<__mmask32>(in.k), A, B)));
CASE(kF512, kBits, testn_epi8_mask, OUT(_mm512_testn_epi8_mask(A, B)));
SCALAR(testn_epi8_mask, MASK(uint64_t, uint8_t, 64, (x & y) == 0));
CASE(kF512, kBits, testn_epi32_mask, OUT(_mm512_testn_epi32_mask(A, B)));
SCALAR(testn_epi32_mask, MASK(uint16_t, uint32_t, 16, (x & y) == 0));
