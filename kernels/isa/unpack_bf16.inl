// B of the tile kernels with bf16 products (gemm_amx.inl): weights with their scales, rounded once
// to bf16, to nearest even. The tile unit takes subnormals for zeros, so weights below 2^-126 count
// as zeros. A piece is 8 columns: 4 steps of bf16, 2 of 8-bit codes, 1 of 4-bit codes.
constexpr int64_t kPieceCols = 8;

struct Bf16Units : PackedUnits<false> {
  Bf16Units(const uint8_t* tile, const MatrixLayout&) : PackedUnits{tile} {}
  void finish(const ActRows&, int64_t, float*) const {}
};

inline I bf16_words(F high, F low) { return (I)_mm512_cvtne2ps_pbh(high, low); }
// a where the bits of mask are set, else b.
inline I select(I mask, I a, I b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }
// Each lane's low 16 bits in both of its halves.
inline I both_halves(I x) { return _mm512_or_si512(x, i_sll<16>(x)); }
inline I widen_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// 16 scales of lanes `lane` and on.
inline F tile_scales(const uint8_t* p, ScaleType type, int lane) {
  const auto* half = reinterpret_cast<const uint16_t*>(p) + lane;
  switch (type) {
    case ScaleType::kFP16: return f_load_fp16(half);
    case ScaleType::kBF16: return as_f(i_sll<16>(i_load_u16(half)));
    default: return f_load(reinterpret_cast<const float*>(p) + lane);
  }
}
// 2^(code - 127); that of code 0 is subnormal.
inline F ue8m0_scales(const uint8_t* p) {
  return as_f(i_max(i_sll<23>(widen_bytes(p)), i_set(0x00400000)));
}
// Non-negative e4m3 codes. Seven bits further up they are fp16 of 2^-8 times their value.
inline F e4m3_scales(const uint8_t* p) {
  const __m256i half = _mm512_cvtepi32_epi16(i_sll<7>(widen_bytes(p)));
  return f_mul(_mm512_cvtph_ps(half), f_set(256.0f));
}

// ---- Four-bit codes through a table of their values: any scales, in float32. A float32 vector
// covers 8 lanes by two columns, in the order in which two of them become one of bf16.
struct LanePairs {
  alignas(64) float value[4][16];
  // Of lanes 0..15 and 16..31.
  void set(F first, F second) {
    for (int i = 0; i < 4; ++i)
      f_store(value[i], _mm512_permutexvar_ps(pair_index(i % 2), i < 2 ? first : second));
  }
  static I pair_index(int half) {
    return i_add(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), i_set(8 * half));
  }
};

template <bool zero>
inline void unpack_codes(const uint8_t* step, F table, const LanePairs& scales,
                         const LanePairs& zeros, uint8_t* dst) {
  // Columns 0, 1 of the step's 8, then 2, 3 and so on (format.h, 4-bit step).
  const I even = _mm512_set_epi32(8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0);
  const I shifts[4] = {even, i_add(even, i_set(16)), i_add(even, i_set(4)), i_add(even, i_set(20))};
  for (int v = 0; v < 2; ++v) {
    const I x = i_load(step + v * 64);
    const I pairs[2] = {_mm512_permutexvar_epi32(LanePairs::pair_index(0), x),
                        _mm512_permutexvar_epi32(LanePairs::pair_index(1), x)};
    for (int s = 0; s < 4; ++s) {
      F w[2];
      for (int h = 0; h < 2; ++h) {
        w[h] = _mm512_permutexvar_ps(_mm512_srlv_epi32(pairs[h], shifts[s]), table);
        if constexpr (zero) w[h] = _mm512_sub_ps(w[h], f_load(zeros.value[2 * v + h]));
        w[h] = f_mul(w[h], f_load(scales.value[2 * v + h]));
      }
      i_store(dst + s * kStepBytes + v * 64, bf16_words(w[1], w[0]));
    }
  }
}

template <bool has_zero> struct Int4GroupUnits : UnpackedUnits<false> {
  const uint8_t* src;
  const int64_t scale_bytes, block_scale_bytes, block_pieces;
  const ScaleType type;
  int64_t left = 0;  // pieces of the present group
  LanePairs scales, zeros;
  Int4GroupUnits(const uint8_t* tile, const MatrixLayout& layout)
      : src(tile),
        scale_bytes(kTileRows * layout.scale_bytes()),
        block_scale_bytes(layout.block_scale_bytes()),
        block_pieces(layout.group / kPieceCols),
        type(layout.scale) {}
  void prepare(int64_t p) {
    if (left == 0) {
      scales.set(tile_scales(src, type, 0), tile_scales(src, type, 16));
      if constexpr (has_zero)
        zeros.set(to_f(widen_bytes(src + scale_bytes)), to_f(widen_bytes(src + scale_bytes + 16)));
      src += block_scale_bytes;
      left = block_pieces;
    }
    prefetch_ahead<kStepBytes>(src);
    const F table = has_zero ? _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
                             : _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    unpack_codes<has_zero>(src, table, scales, zeros, piece(p));
    src += kStepBytes;
    --left;
  }
  void finish(const ActRows&, int64_t, float*) const {}
};

// ---- e2m1. Magnitudes are 2^e or 1.5 * 2^e, so a weight is the rounded scale or the rounded 1.5 *
// scale, its exponent moved by e: integer additions, as long as no exponent leaves its range.
struct E2m1Scales {
  alignas(64) int32_t one[2][16], one_and_half[2][16];  // bf16, in both halves of a lane
  LanePairs pairs;
  bool in_range;
  void set(F first, F second) {
    const F s[2] = {first, second};
    in_range = true;
    for (int v = 0; v < 2; ++v) {
      const I exponent = i_sub(i_srl<23>(as_i(s[v])), i_set(4));
      in_range &= _mm512_cmplt_epu32_mask(exponent, i_set(247)) == 0xffff;
      i_store(one[v], words(s[v]));
      i_store(one_and_half[v], words(f_mul(s[v], f_set(1.5f))));
    }
    if (!in_range) pairs.set(first, second);
  }
  static I words(F x) {
    return both_halves(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)));
  }
};

// A word vector of 32 from 16 words.
inline I word_table(int w15, int w14, int w13, int w12, int w11, int w10, int w9, int w8, int w7,
                    int w6, int w5, int w4, int w3, int w2, int w1, int w0) {
  const auto two = [](int high, int low) { return int32_t(uint32_t(high) << 16 | low); };
  const int a = two(w1, w0), b = two(w3, w2), c = two(w5, w4), d = two(w7, w6), e = two(w9, w8),
            f = two(w11, w10), g = two(w13, w12), h = two(w15, w14);
  return _mm512_set_epi32(h, g, f, e, d, c, b, a, h, g, f, e, d, c, b, a);
}

inline void unpack_e2m1(const uint8_t* step, const E2m1Scales& scales, uint8_t* dst) {
  if (!scales.in_range) {
    const F table = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
    return unpack_codes<false>(step, table, scales.pairs, scales.pairs, dst);
  }
  // Per code: e in the exponent's place, with the sign; whether the magnitude is 1.5 * 2^e.
  const I exponents = word_table(0x8100, 0x8100, 0x8080, 0x8080, 0x8000, 0x8000, 0x7f80, 0, 0x100,
                                 0x100, 0x80, 0x80, 0, 0, 0xff80, 0);
  const I halves = word_table(0xffff, 0, 0xffff, 0, 0xffff, 0, 0, 0, 0xffff, 0, 0xffff, 0, 0xffff, 0,
                              0, 0);
  const I swap = i_set(0x03010200), magnitude = i_set(0x00070007);
  // Bytes 1 and 2 of each lane change places: nibbles 0, 2, 1, 3 of its words are then the columns
  // 0 1, 2 3, 4 5, 6 7.
  const I in_lane = i_add(_mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c)), swap);
  for (int v = 0; v < 2; ++v) {
    const I x = _mm512_shuffle_epi8(i_load(step + v * 64), in_lane);
    const I codes[4] = {x, _mm512_srli_epi16(x, 8), _mm512_srli_epi16(x, 4), _mm512_srli_epi16(x, 12)};
    for (int s = 0; s < 4; ++s) {
      const I mantissa = select(_mm512_permutexvar_epi16(codes[s], halves),
                                i_load(scales.one_and_half[v]), i_load(scales.one[v]));
      const I w = _mm512_maskz_add_epi16(_mm512_test_epi16_mask(codes[s], magnitude), mantissa,
                                         _mm512_permutexvar_epi16(codes[s], exponents));
      i_store(dst + s * kStepBytes + v * 64, w);
    }
  }
}

struct MxFp4Units : UnpackedUnits<false> {
  const uint8_t* tile;
  E2m1Scales scales;
  MxFp4Units(const uint8_t* t, const MatrixLayout&) : tile(t) {}
  void prepare(int64_t p) {  // blocks of 64 columns, scales of 32
    const uint8_t* block = tile + p / 8 * (64 + 8 * kStepBytes);
    const uint8_t* scale = block + p % 8 / 4 * kTileRows;
    if (p % 4 == 0) scales.set(ue8m0_scales(scale), ue8m0_scales(scale + 16));
    const uint8_t* step = block + 64 + p % 8 * kStepBytes;
    prefetch_ahead<kStepBytes>(step);
    unpack_e2m1(step, scales, piece(p));
  }
  void finish(const ActRows&, int64_t, float*) const {}
};

struct NvFp4Units : UnpackedUnits<false> {
  const uint8_t* tile;
  E2m1Scales scales;
  NvFp4Units(const uint8_t* t, const MatrixLayout&) : tile(t) {}
  void prepare(int64_t p) {  // blocks of 32 columns, scales of 16
    const uint8_t* block = tile + 64 + p / 4 * (64 + 4 * kStepBytes);
    const uint8_t* scale = block + p % 4 / 2 * kTileRows;
    if (p % 2 == 0) {
      const F global = f_set(*reinterpret_cast<const float*>(tile));
      scales.set(f_mul(e4m3_scales(scale), global), f_mul(e4m3_scales(scale + 16), global));
    }
    const uint8_t* step = block + 64 + p % 4 * kStepBytes;
    prefetch_ahead<kStepBytes>(step);
    unpack_e2m1(step, scales, piece(p));
  }
  void finish(const ActRows&, int64_t, float*) const {}
};

// ---- e4m3 through a table of the bf16 of all 128 magnitudes, times a scale.
struct E4m3Table {
  alignas(64) uint8_t low[128], high[128];
  void set(float scale) {
    const I numbers = word_table(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    I words[4];
    for (int i = 0; i < 4; ++i) {
      F half[2];
      for (int h = 0; h < 2; ++h) {
        // As in e4m3_scales.
        const I codes = _mm512_slli_epi16(
            _mm512_add_epi16(numbers, _mm512_set1_epi16(int16_t(32 * i + 16 * h))), 7);
        half[h] = f_mul(f_mul(_mm512_cvtph_ps(_mm512_castsi512_si256(codes)), f_set(256.0f)),
                        f_set(scale));
      }
      words[i] = bf16_words(half[1], half[0]);
    }
    I even = i_zero();  // bytes 0, 2, 4 ... of two vectors
    alignas(64) uint8_t index[64];
    for (int i = 0; i < 64; ++i) index[i] = uint8_t(2 * i);
    even = i_load(index);
    const I odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    for (int i = 0; i < 2; ++i) {
      const I a = words[2 * i], b = words[2 * i + 1];
      i_store(low + 64 * i, _mm512_permutex2var_epi8(a, even, b));
      i_store(high + 64 * i, _mm512_permutex2var_epi8(a, odd, b));
    }
  }
};

// 64 codes (16 lanes of an 8-bit step) to two steps.
struct TwoSteps {
  I first, second;
};
inline TwoSteps look_up_e4m3(I codes, const E4m3Table& table) {
  const I low = _mm512_permutex2var_epi8(i_load(table.low), codes, i_load(table.low + 64));
  const I unsigned_high =
      _mm512_permutex2var_epi8(i_load(table.high), codes, i_load(table.high + 64));
  const I high = select(i_set(int32_t(0x80808080)), codes, unsigned_high);
  const I low_bytes = i_set(0x00ff00ff);
  return {select(low_bytes, low, _mm512_slli_epi16(high, 8)),
          select(low_bytes, _mm512_srli_epi16(low, 8), high)};
}

template <bool per_row> struct Fp8Units : UnpackedUnits<false> {
  const uint8_t *tile, *steps;
  E4m3Table table;
  Fp8Units(const uint8_t* t, const MatrixLayout& layout) : tile(t), steps(t + layout.head_bytes()) {
    if (per_row) table.set(1.0f);
  }
  void prepare(int64_t p) {
    constexpr int64_t kBlock = kFp8BlockSize / kPieceCols;
    if (!per_row && p % kBlock == 0) table.set(reinterpret_cast<const float*>(tile)[p / kBlock]);
    const uint8_t* src = steps + p * 2 * kStepBytes;
    uint8_t* dst = piece(p);
    prefetch_ahead<2 * kStepBytes>(src);
    for (int s = 0; s < 2; ++s)
      for (int v = 0; v < 2; ++v) {
        const TwoSteps w = look_up_e4m3(i_load(src + s * kStepBytes + v * 64), table);
        i_store(dst + 2 * s * kStepBytes + v * 64, w.first);
        i_store(dst + (2 * s + 1) * kStepBytes + v * 64, w.second);
      }
  }
  void finish(const ActRows&, int64_t m, float* out) const {
    if (!per_row) return;
    const auto* scale = reinterpret_cast<const float*>(tile);
    for (int64_t r = 0; r < m; ++r)
      for (int n = 0; n < kTileRows; n += kLanes) {
        float* x = out + r * kTileRows + n;
        f_store(x, f_mul(f_load(x), f_load(scale + n)));
      }
  }
};

// Powers of two per lane: the exponents of both words of each lane are moved, as integers where
// none leaves its range.
struct ExponentScales {
  alignas(64) int32_t move[2][16];
  alignas(64) float factor[2][16];
  bool in_range;
  void set(const uint8_t* codes) {
    in_range = true;
    for (int v = 0; v < 2; ++v) {
      const I code = widen_bytes(codes + 16 * v);
      // e4m3 is 2^-9 to 1.75 * 2^8.
      in_range &= _mm512_cmplt_epu32_mask(i_sub(code, i_set(10)), i_set(237)) == 0xffff;
      i_store(move[v], both_halves(i_and(i_sll<7>(i_sub(code, i_set(127))), i_set(0xffff))));
      f_store(factor[v], ue8m0_scales(codes + 16 * v));
    }
  }
  I apply(I words, int v) const {
    if (in_range)
      return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(words, i_set(0x7fff7fff)), words,
                                    i_load(move[v]));
    // Exact but for infinities, and for subnormals, which do not count.
    const F scale = f_load(factor[v]);
    const I upper = i_set(int32_t(0xffff0000));
    const F low = f_mul(as_f(i_sll<16>(words)), scale), high = f_mul(as_f(i_and(words, upper)), scale);
    return select(upper, as_i(high), i_srl<16>(as_i(low)));
  }
};

struct MxFp8Units : UnpackedUnits<false> {
  const uint8_t* tile;
  E4m3Table table;
  ExponentScales scales;
  MxFp8Units(const uint8_t* t, const MatrixLayout&) : tile(t) { table.set(1.0f); }
  void prepare(int64_t p) {  // blocks of 64 columns, scales of 32
    const uint8_t* block = tile + p / 8 * (64 + 16 * kStepBytes);
    if (p % 4 == 0) scales.set(block + p % 8 / 4 * kTileRows);
    const uint8_t* src = block + 64 + p % 8 * 2 * kStepBytes;
    uint8_t* dst = piece(p);
    prefetch_ahead<2 * kStepBytes>(src);
    for (int s = 0; s < 2; ++s)
      for (int v = 0; v < 2; ++v) {
        const TwoSteps w = look_up_e4m3(i_load(src + s * kStepBytes + v * 64), table);
        i_store(dst + 2 * s * kStepBytes + v * 64, scales.apply(w.first, v));
        i_store(dst + (2 * s + 1) * kStepBytes + v * 64, scales.apply(w.second, v));
      }
  }
  void finish(const ActRows&, int64_t, float*) const {}
};
