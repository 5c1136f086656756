// Dropout (kt/training.h, DropKey). Plain loops, which the compiler vectorises.
constexpr int kDropColumns = 32;  // at a time

// Philox 4x32-10 of counters (first, token, expert, matrix), (first + 1, ...) and so on. Word j of
// counter i is numbers[j][i].
inline void philox(const DropKey& key, uint32_t first, uint32_t token,
                   uint32_t (&numbers)[4][kDropColumns / 4]) {
  constexpr int kCounters = kDropColumns / 4;
  auto& [c0, c1, c2, c3] = numbers;
  for (int i = 0; i < kCounters; ++i) {
    c0[i] = first + uint32_t(i);
    c1[i] = token;
    c2[i] = key.expert;
    c3[i] = key.matrix;
  }
  auto k0 = uint32_t(key.seed), k1 = uint32_t(key.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9, k1 += 0xbb67ae85)
    for (int i = 0; i < kCounters; ++i) {
      const uint64_t x = uint64_t{0xd2511f53} * c0[i], y = uint64_t{0xcd9e8d57} * c2[i];
      c0[i] = uint32_t(y >> 32) ^ c1[i] ^ k0;
      c2[i] = uint32_t(x >> 32) ^ c3[i] ^ k1;
      c1[i] = uint32_t(y);
      c3[i] = uint32_t(x);
    }
}

void drop_columns(const DropKey& key, uint32_t token, int64_t column, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += kDropColumns, x += kDropColumns) {
    uint32_t numbers[4][kDropColumns / 4];
    philox(key, uint32_t((column + i) / 4), token, numbers);
    for (int c = 0; c < kDropColumns; ++c)
      x[c] = numbers[c % 4][c / 4] < key.threshold ? 0.0f : x[c] * key.scale;
  }
}
