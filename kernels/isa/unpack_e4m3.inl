// B of the tile kernels from e4m3 codes (gemm_amx.inl, unpack_bf16.inl), by look-ups in a table of
// all 128 magnitudes as bf16, times a scale.
struct E4m3Table {
  alignas(64) uint8_t low[128], high[128];
  void set(float scale) {
    const I numbers = word_table(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    I words[4];
    for (int i = 0; i < 4; ++i) {
      F half[2];
      for (int h = 0; h < 2; ++h) {
        // e4m3 shifted left by seven bits is fp16 of value * 2^-8.
        const I codes = _mm512_slli_epi16(
            _mm512_add_epi16(numbers, _mm512_set1_epi16(int16_t(32 * i + 16 * h))), 7);
        half[h] = f_mul(f_mul(_mm512_cvtph_ps(_mm512_castsi512_si256(codes)), f_set(kE4m3Unit)),
                        f_set(scale));
      }
      words[i] = bf16_words(half[1], half[0]);
    }
    alignas(64) uint8_t index[64];
    for (int i = 0; i < 64; ++i) index[i] = uint8_t(2 * i);
    const I even = i_load(index);  // bytes 0, 2, 4 ... of two vectors
    const I odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    for (int i = 0; i < 2; ++i) {
      const I a = words[2 * i], b = words[2 * i + 1];
      i_store(low + 64 * i, _mm512_permutex2var_epi8(a, even, b));
      i_store(high + 64 * i, _mm512_permutex2var_epi8(a, odd, b));
    }
  }
};

// Unpacks 64 codes (16 lanes of an 8-bit step) to two steps.
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
