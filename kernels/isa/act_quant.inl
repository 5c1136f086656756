// Activation rows to A operands (kernel_table.h, QuantiseRow).
constexpr int32_t kInfBits = 0x7f800000;

// max |x| of columns [begin, end). Absolute values compare as integers, NaN above infinity, so
// one integer maximum finds both; either gives NaN.
inline float absmax_columns(const void* src, DType type, int64_t begin, int64_t end) {
  I most = i_zero();
  for (int64_t i = begin; i < end; i += kLanes)
    most = i_max(most, i_and(as_i(load_row(src, type, i, end)), i_set(0x7fffffff)));
  alignas(64) int32_t lane[kLanes];
  i_store(lane, most);
  int32_t bits = 0;
  for (int32_t x : lane) bits = x > bits ? x : bits;
  if (bits >= kInfBits) bits = 0x7fc00000;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

float absmax_row(const void* src, DType type, int64_t k) { return absmax_columns(src, type, 0, k); }

// int8 values of columns [begin, end), zeros up to padded_end; returns their sum. A multiplier
// of 0 (nothing to represent, or NaN scale) gives zeros.
inline int32_t quantise_columns(const void* src, DType type, int64_t begin, int64_t end,
                                int64_t padded_end, float multiplier, int8_t* dst) {
  const F factor = f_set(multiplier);
  I sum = i_zero();
  for (int64_t i = begin; i < padded_end; i += kLanes) {
    const I q = multiplier == 0 ? i_zero() : round_i(f_mul(load_row(src, type, i, end), factor));
    sum = i_add(sum, q);
    i_store_i8(dst + i, q);
  }
  alignas(64) int32_t lane[kLanes];
  i_store(lane, sum);
  int32_t total = 0;
  for (int32_t x : lane) total += x;
  return total;
}

// 127 / absmax, or 0 where it has no finite value (absmax zero, under 3.8e-37, or NaN).
inline float int8_multiplier(float absmax) {
  const float multiplier = 127.0f / absmax;
  return multiplier <= 3.4028234e38f ? multiplier : 0.0f;
}

void quantise_int8_row(const void* src, DType type, int64_t k, int64_t k_padded, int,
                       float row_absmax, uint8_t* dst, float* scale, int32_t* sum) {
  const float absmax = row_absmax < 0 ? absmax_columns(src, type, 0, k) : row_absmax;
  *scale = absmax / 127.0f;
  *sum = quantise_columns(src, type, 0, k, k_padded, int8_multiplier(absmax),
                          reinterpret_cast<int8_t*>(dst));
}

void quantise_int8_groups(const void* src, DType type, int64_t k, int64_t k_padded, int group,
                          float, uint8_t* dst, float* scale, int32_t* sum) {
  for (int64_t g = 0, i = 0; i < k_padded; ++g, i += group) {
    const int64_t end = i + group < k ? i + group : k;
    const float absmax = absmax_columns(src, type, i, end);
    scale[g] = absmax / 127.0f;
    sum[g] = quantise_columns(src, type, i, end, i + group, int8_multiplier(absmax),
                              reinterpret_cast<int8_t*>(dst));
  }
}

void quantise_bf16(const void* src, DType type, int64_t k, int64_t k_padded, int, float,
                   uint8_t* dst, float*, int32_t*) {
  for (int64_t i = 0; i < k_padded; i += kLanes) {
    const F x = load_row(src, type, i, k);
#ifdef KT_BF16_OPERANDS
    store_bf16(reinterpret_cast<uint16_t*>(dst) + i, x);
#else
    f_store(reinterpret_cast<float*>(dst) + i, round_bf16(x));
#endif
  }
}
