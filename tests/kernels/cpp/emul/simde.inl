// What SIMDe supplies, checked against the real instruction only.
#define BINARY(name) CASE(kF512, kBits, name, OUT(_mm512_##name(A, B)))
// clang-format off
BINARY(add_epi8); BINARY(add_epi16); BINARY(add_epi32); BINARY(add_epi64); BINARY(sub_epi8);
BINARY(sub_epi16); BINARY(sub_epi32); BINARY(sub_epi64); BINARY(mullo_epi16); BINARY(mullo_epi32);
BINARY(mulhi_epi16); BINARY(mul_epu32); BINARY(max_epi8); BINARY(max_epi16); BINARY(max_epi32);
BINARY(max_epu8); BINARY(max_epu16); BINARY(max_epu32); BINARY(min_epi8); BINARY(min_epi16);
BINARY(min_epi32); BINARY(min_epu8); BINARY(min_epu16); BINARY(min_epu32); BINARY(and_si512);
BINARY(or_si512); BINARY(xor_si512); BINARY(andnot_si512); BINARY(and_epi32); BINARY(or_epi32);
BINARY(xor_epi32); BINARY(andnot_epi32); BINARY(adds_epi8); BINARY(adds_epi16); BINARY(adds_epu8);
BINARY(subs_epi8); BINARY(subs_epi16); BINARY(subs_epu8); BINARY(maddubs_epi16);
BINARY(packs_epi16); BINARY(packs_epi32); BINARY(packus_epi16); BINARY(packus_epi32);
BINARY(shuffle_epi8); BINARY(unpacklo_epi8); BINARY(unpackhi_epi8); BINARY(unpacklo_epi16);
BINARY(unpackhi_epi16); BINARY(unpacklo_epi32); BINARY(unpackhi_epi32); BINARY(unpacklo_epi64);
BINARY(unpackhi_epi64); BINARY(sllv_epi32); BINARY(srlv_epi32); BINARY(sllv_epi16);
BINARY(srlv_epi16); BINARY(srav_epi16); BINARY(permutexvar_epi16); BINARY(permutexvar_epi32);
BINARY(permutexvar_epi64);
// clang-format on
CASE(kVBMI, kBits, permutexvar_epi8, OUT(_mm512_permutexvar_epi8(A, B)));
CASE(kVBMI, kBits, permutex2var_epi8, OUT(_mm512_permutex2var_epi8(A, B, C)));
CASE(kVBMI, kBits, multishift_epi64_epi8, OUT(_mm512_multishift_epi64_epi8(A, B)));
CASE(kVBMI, kBits, maskz_permutexvar_epi8, OUT(_mm512_maskz_permutexvar_epi8(in.k, A, B)));
CASE(kF512, kBits, permutexvar_ps, OUT(_mm512_permutexvar_ps(A, FB)));
CASE(kF512, kBits, permutex2var_epi16, OUT(_mm512_permutex2var_epi16(A, B, C)));
CASE(kF512, kBits, permutex2var_epi32, OUT(_mm512_permutex2var_epi32(A, B, C)));
CASE(kF512, kBits, permutex2var_epi64, OUT(_mm512_permutex2var_epi64(A, B, C)));
CASE(kF512, kBits, permutex2var_ps, OUT(_mm512_permutex2var_ps(FA, B, FC)));
#define BINARY_PS(name) CASE(kF512, kFloats, name, OUT(_mm512_##name(FA, FB)))
// clang-format off
BINARY_PS(add_ps); BINARY_PS(sub_ps); BINARY_PS(mul_ps); BINARY_PS(div_ps); BINARY_PS(max_ps);
BINARY_PS(min_ps); BINARY_PS(and_ps); BINARY_PS(or_ps); BINARY_PS(xor_ps); BINARY_PS(andnot_ps);
BINARY_PS(unpacklo_ps); BINARY_PS(unpackhi_ps);
// clang-format on
#define TERNARY_PS(name) CASE(kF512, kFloats, name, OUT(_mm512_##name(FA, FB, FC)))
// clang-format off
TERNARY_PS(fmadd_ps); TERNARY_PS(fmsub_ps); TERNARY_PS(fnmadd_ps); TERNARY_PS(fnmsub_ps);
// clang-format on
CASE(kF512, kFloats, mask_fmadd_ps, OUT(_mm512_mask_fmadd_ps(FA, K16, FB, FC)));
CASE(kF512, kFloats, maskz_fmadd_ps, OUT(_mm512_maskz_fmadd_ps(K16, FA, FB, FC)));
CASE(kF512, kFloats, sqrt_ps, OUT(_mm512_sqrt_ps(FA)));
CASE(kF512, kFloats, mask_add_ps, OUT(_mm512_mask_add_ps(FC, K16, FA, FB)));
CASE(kF512, kFloats, maskz_mul_ps, OUT(_mm512_maskz_mul_ps(K16, FA, FB)));
CASE(kF512, kFloats, mask_max_ps, OUT(_mm512_mask_max_ps(FC, K16, FA, FB)));
CASE(kF512, kFloats, roundscale_ps_nearest, OUT(_mm512_roundscale_ps(FA, 0)));
CASE(kF512, kFloats, roundscale_ps_floor, OUT(_mm512_roundscale_ps(FA, 1)));
CASE(kF512, kFloats, roundscale_ps_truncate, OUT(_mm512_roundscale_ps(FA, 3)));
CASE(kF512, kBits, abs_epi8, OUT(_mm512_abs_epi8(A)));
CASE(kF512, kBits, abs_epi16, OUT(_mm512_abs_epi16(A)));
CASE(kF512, kBits, abs_epi32, OUT(_mm512_abs_epi32(A)));
CASE(kF512, kBits, ternarylogic_epi32, OUT(_mm512_ternarylogic_epi32(A, B, C, 0xca)));
CASE(kF512, kBits, ternarylogic_epi32_select, OUT(_mm512_ternarylogic_epi32(A, B, C, 0xd8)));
CASE(kF512, kBits, slli_epi16, OUT(_mm512_slli_epi16(A, 5)));
CASE(kF512, kBits, srli_epi16, OUT(_mm512_srli_epi16(A, 4)));
CASE(kF512, kBits, srai_epi16, OUT(_mm512_srai_epi16(A, 8)));
CASE(kF512, kBits, slli_epi32, OUT(_mm512_slli_epi32(A, 16)));
CASE(kF512, kBits, srli_epi32, OUT(_mm512_srli_epi32(A, 7)));
CASE(kF512, kBits, slli_epi64, OUT(_mm512_slli_epi64(A, 33)));
CASE(kF512, kBits, srli_epi64, OUT(_mm512_srli_epi64(A, 9)));
CASE(kF512, kBits, mask_sub_epi8, OUT(_mm512_mask_sub_epi8(C, in.k, A, B)));
CASE(kF512, kBits, maskz_add_epi16,
     OUT(_mm512_maskz_add_epi16(static_cast<__mmask32>(in.k), A, B)));
CASE(kF512, kBits, mask_add_epi32, OUT(_mm512_mask_add_epi32(C, K16, A, B)));
CASE(kF512, kBits, mask_sub_epi32, OUT(_mm512_mask_sub_epi32(C, K16, A, B)));
CASE(kF512, kBits, mask_blend_epi8, OUT(_mm512_mask_blend_epi8(in.k, A, B)));
CASE(kF512, kBits, mask_blend_epi16, OUT(_mm512_mask_blend_epi16(K32, A, B)));
CASE(kF512, kBits, mask_blend_epi32, OUT(_mm512_mask_blend_epi32(K16, A, B)));
CASE(kF512, kBits, mask_blend_ps, OUT(_mm512_mask_blend_ps(K16, FA, FB)));
CASE(kF512, kBits, mask_mov_epi8, OUT(_mm512_mask_mov_epi8(A, in.k, B)));
CASE(kF512, kBits, mask_mov_ps, OUT(_mm512_mask_mov_ps(FA, K16, FB)));
CASE(kF512, kBits, maskz_mov_epi8, OUT(_mm512_maskz_mov_epi8(in.k, B)));
CASE(kF512, kBits, maskz_mov_epi16, OUT(_mm512_maskz_mov_epi16(K32, B)));
CASE(kF512, kBits, maskz_mov_epi32, OUT(_mm512_maskz_mov_epi32(K16, B)));
CASE(kF512, kBits, maskz_mov_ps, OUT(_mm512_maskz_mov_ps(K16, FB)));
CASE(kF512, kBits, mask_set1_epi8, OUT(_mm512_mask_set1_epi8(A, in.k, 77)));
CASE(kF512, kBits, maskz_set1_epi32, OUT(_mm512_maskz_set1_epi32(K16, -5)));
CASE(kF512, kBits, movepi8_mask, OUT(_mm512_movepi8_mask(A)));
CASE(kF512, kBits, movepi16_mask, OUT(_mm512_movepi16_mask(A)));
CASE(kF512, kBits, movepi32_mask, OUT(_mm512_movepi32_mask(A)));
CASE(kF512, kBits, movm_epi8, OUT(_mm512_movm_epi8(in.k)));
CASE(kF512, kBits, movm_epi32, OUT(_mm512_movm_epi32(K16)));
CASE(kF512, kBits, test_epi8_mask, OUT(_mm512_test_epi8_mask(A, B)));
CASE(kF512, kBits, test_epi32_mask, OUT(_mm512_test_epi32_mask(A, B)));
CASE(kF512, kBits, set1_epi8, OUT(_mm512_set1_epi8(static_cast<char>(in.a[0]))));
CASE(kF512, kBits, set1_epi16, OUT(_mm512_set1_epi16(static_cast<short>(in.a[0] * 259))));
CASE(kF512, kBits, set1_epi32, OUT(_mm512_set1_epi32(in.a[0] * 65537)));
CASE(kF512, kBits, set1_epi64, OUT(_mm512_set1_epi64(in.a[0] * 4294967297)));
CASE(kF512, kBits, set1_ps, OUT(_mm512_set1_ps(in.a[0])));
CASE(kF512, kBits, setr_epi32,
     OUT(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, in.a[0])));
CASE(kF512, kBits, set_epi32,
     OUT(_mm512_set_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, in.a[0])));
CASE(kF512, kBits, cvtepi8_epi16, OUT(_mm512_cvtepi8_epi16(A256)));
CASE(kF512, kBits, cvtepi16_epi8, OUT(_mm512_cvtepi16_epi8(A)));
CASE(kF512, kBits, cvtsepi16_epi8, OUT(_mm512_cvtsepi16_epi8(A)));
CASE(kF512, kBits, cvtsepi32_epi8, OUT(_mm512_cvtsepi32_epi8(A)));
CASE(kF512, kBits, cvtsepi32_epi16, OUT(_mm512_cvtsepi32_epi16(A)));
CASE(kF512, kBits, cvtepi64_epi32, OUT(_mm512_cvtepi64_epi32(A)));
CASE(kF512, kBits, broadcast_i32x4, OUT(_mm512_broadcast_i32x4(A128)));
CASE(kF512, kBits, broadcast_f32x4, OUT(_mm512_broadcast_f32x4(_mm_castsi128_ps(A128))));
CASE(kF512, kBits, broadcast_i64x4, OUT(_mm512_broadcast_i64x4(A256)));
CASE(kF512, kBits, broadcastb_epi8, OUT(_mm512_broadcastb_epi8(A128)));
CASE(kF512, kBits, broadcastw_epi16, OUT(_mm512_broadcastw_epi16(A128)));
CASE(kF512, kBits, broadcastd_epi32, OUT(_mm512_broadcastd_epi32(A128)));
CASE(kF512, kBits, broadcastq_epi64, OUT(_mm512_broadcastq_epi64(A128)));
CASE(kF512, kBits, broadcastss_ps, OUT(_mm512_broadcastss_ps(_mm_castsi128_ps(A128))));
CASE(kF512, kBits, castsi512_si256, OUT(_mm512_castsi512_si256(A)));
CASE(kF512, kBits, castsi512_si128, OUT(_mm512_castsi512_si128(A)));
CASE(kF512, kBits, castps512_ps256, OUT(_mm512_castps512_ps256(FA)));
CASE(kF512, kBits, castsi256_si512, OUT(_mm512_castsi512_si256(_mm512_castsi256_si512(A256))));
CASE(kF512, kBits, extracti64x4_epi64, OUT(_mm512_extracti64x4_epi64(A, 1)));
CASE(kF512, kBits, extracti32x4_epi32, OUT(_mm512_extracti32x4_epi32(A, 2)));
CASE(kF512, kBits, extractf32x4_ps, OUT(_mm512_extractf32x4_ps(FA, 3)));
CASE(kF512, kBits, inserti64x4, OUT(_mm512_inserti64x4(A, B256, 1)));
CASE(kF512, kBits, inserti32x4, OUT(_mm512_inserti32x4(A, C128, 3)));
CASE(kF512, kBits, inserti32x8, OUT(_mm512_inserti32x8(A, B256, 1)));
CASE(kF512, kBits, shuffle_ps, OUT(_mm512_shuffle_ps(FA, FB, 0x1b)));
CASE(kF512, kBits, load_store_si512, _mm512_store_si512(out.v, _mm512_load_si512(in.a)));
CASE(kF512, kBits, load_store_ps, _mm512_store_ps(out.v, _mm512_load_ps(in.a)));
CASE(kF512, kBits, loadu_storeu_epi8, _mm512_storeu_epi8(out.v + 1, _mm512_loadu_epi8(in.a + 3)));
CASE(kF512, kBits, loadu_storeu_epi32,
     _mm512_storeu_epi32(out.v + 1, _mm512_loadu_epi32(in.a + 3)));
