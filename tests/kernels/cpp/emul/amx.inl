// Tile 0 += tile 1 x tile 2, in a full and in a ragged shape, and what tiles must refuse. After
// bf16.inl, whose helpers it uses.
struct Shape {
  int m, n, k;  // rows of dst, dwords per row of dst, dwords per row of a
};
static constexpr Shape kFull{16, 16, 16}, kRagged{5, 9, 7};
struct Config {
  alignas(64) uint8_t bytes[64];
};
static Config config_of(Shape s) {
  Config c{};
  c.bytes[0] = 1;
  const int rows[3] = {s.m, s.m, s.k}, dwords[3] = {s.n, s.k, s.n};
  for (int t = 0; t < 3; ++t) {
    c.bytes[16 + 2 * t] = static_cast<uint8_t>(4 * dwords[t]);
    c.bytes[48 + t] = static_cast<uint8_t>(rows[t]);
  }
  return c;
}
#define TILES(shape, product)                    \
  static const Config config = config_of(shape); \
  _tile_loadconfig(config.bytes);                \
  _tile_loadd(0, in.c, 64);                      \
  _tile_loadd(1, in.a, 64);                      \
  _tile_stream_loadd(2, in.b, 64);               \
  product(0, 1, 2);                              \
  _tile_stored(0, out.v, 64);                    \
  _tile_release();
template <class TA, class TB>
[[maybe_unused]] static void int8_product(const Input& in, Output& out, Shape s) {
  for (int m = 0; m < s.m; ++m)
    for (int n = 0; n < s.n; ++n) {
      uint32_t acc = get<uint32_t>(in.c, 16 * m + n);
      for (int k = 0; k < s.k; ++k)
        for (int i = 0; i < 4; ++i)
          acc += static_cast<uint32_t>(static_cast<int>(get<TA>(in.a, 64 * m + 4 * k + i)) *
                                       get<TB>(in.b, 64 * k + 4 * n + i));
      set<uint32_t>(out, 16 * m + n, acc);
    }
}
[[maybe_unused]] static float add_flushed(float a, float b) { return fma_flushed(a, 1, b); }
[[maybe_unused]] static void bf16_product(const Input& in, Output& out, Shape s) {
  for (int m = 0; m < s.m; ++m)
    for (int n = 0; n < s.n; ++n) {
      float sum[2] = {0, 0};
      for (int k = 0; k < s.k; ++k)
        for (int i = 0; i < 2; ++i)
          sum[i] = fma_flushed(from_bf16(get<uint16_t>(in.a, 32 * m + 2 * k + i)),
                               from_bf16(get<uint16_t>(in.b, 32 * k + 2 * n + i)), sum[i]);
      const float c = get<float>(in.c, 16 * m + n);
      set<float>(out, 16 * m + n, add_flushed(c, add_flushed(sum[0], sum[1])));
    }
}
#define TILE_INT8(name, TA, TB)                                       \
  CASE(kAmxInt8, kBits, name##_full, TILES(kFull, _tile_##name));     \
  SCALAR(name##_full, int8_product<TA COMMA TB>(in, out, kFull));     \
  CASE(kAmxInt8, kBits, name##_ragged, TILES(kRagged, _tile_##name)); \
  SCALAR(name##_ragged, int8_product<TA COMMA TB>(in, out, kRagged))
#define COMMA ,
TILE_INT8(dpbssd, int8_t, int8_t);
TILE_INT8(dpbsud, int8_t, uint8_t);
TILE_INT8(dpbusd, uint8_t, int8_t);
TILE_INT8(dpbuud, uint8_t, uint8_t);
CASE(kAmxBf16, kFloats, dpbf16ps_full, TILES(kFull, _tile_dpbf16ps));
SCALAR(dpbf16ps_full, bf16_product(in, out, kFull));
CASE(kAmxBf16, kFloats, dpbf16ps_ragged, TILES(kRagged, _tile_dpbf16ps));
SCALAR(dpbf16ps_ragged, bf16_product(in, out, kRagged));
CASE(kAmxInt8, kBits, tile_zero_store, const Config config = config_of(kRagged);
     _tile_loadconfig(config.bytes); _tile_zero(0); _tile_stored(0, out.v, 64); _tile_release());
SCALAR(tile_zero_store, (void)in; for (int m = 0; m < 5; ++m) memset(out.v + 64 * m, 0, 36));

// ---- what the emulated tiles must refuse; returns when they do not
void emulated_fault(const char* name);
#ifdef KT_EMULATE
void emulated_fault(const char* name) {
  static uint8_t memory[1024];
  Config config = config_of(kRagged);
  if (strcmp(name, "unconfigured") == 0) return _tile_zero(0);
  if (strcmp(name, "reserved") == 0) config.bytes[2] = 1;
  if (strcmp(name, "too_large") == 0) config.bytes[48] = 17;
  if (strcmp(name, "mismatch") == 0) --config.bytes[50];  // rows of b
  _tile_loadconfig(config.bytes);
  if (strcmp(name, "unused_tile") == 0) _tile_loadd(3, memory, 64);
  if (strcmp(name, "same_tile") == 0) _tile_dpbssd(0, 1, 1);
  if (strcmp(name, "mismatch") == 0) _tile_dpbssd(0, 1, 2);
}
#endif
