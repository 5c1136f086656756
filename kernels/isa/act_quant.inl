// Converts activation rows to A operands (kernel_table.h, QuantiseRow).
constexpr int32_t kInfBits = 0x7f800000;

// The largest non-negative lane, as a float. Absolute values compare like integers, NaN above
// infinity, so one integer maximum finds both. NaN or infinity gives NaN.
inline float absmax_lanes(I magnitudes) {
  int32_t bits = max_lanes(magnitudes);
  if (bits >= kInfBits) bits = 0x7fc00000;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

// max |x| of columns [begin, end).
inline float absmax_columns(const void* src, DType type, int64_t begin, int64_t end) {
  I most = i_zero();
  for (int64_t i = begin; i < end; i += kLanes)
    most = i_max(most, i_and(as_i(load_row(src, type, i, end)), i_set(0x7fffffff)));
  return absmax_lanes(most);
}

float absmax_row(const void* src, DType type, int64_t k) { return absmax_columns(src, type, 0, k); }

// Writes the int8 values of columns [begin, end), then zeros up to padded_end; returns their sum. A
// multiplier of 0 (nothing to represent, or a NaN scale) gives zeros.
inline int32_t quantise_columns(const void* src, DType type, int64_t begin, int64_t end,
                                int64_t padded_end, float multiplier, int8_t* dst) {
  const F factor = f_set(multiplier);
  I sum = i_zero();
  for (int64_t i = begin; i < padded_end; i += kLanes) {
    const I q = multiplier == 0 ? i_zero() : round_i(f_mul(load_row(src, type, i, end), factor));
    sum = i_add(sum, q);
    i_store_i8(dst + i, q);
  }
  return sum_lanes(sum);
}

// 127 / absmax, or 0 if that is not finite (absmax is zero, under 3.8e-37, or NaN).
inline float int8_multiplier(float absmax) {
  const float multiplier = 127.0f / absmax;
  return multiplier <= 3.4028234e38f ? multiplier : 0.0f;
}

void quantise_int8_row(const void* src, DType type, int64_t k, int64_t k_padded, float row_absmax,
                       uint8_t* dst, float* scale, int32_t* sum) {
  const float absmax = row_absmax < 0 ? absmax_columns(src, type, 0, k) : row_absmax;
  *scale = absmax / 127.0f;
  *sum = quantise_columns(src, type, 0, k, k_padded, int8_multiplier(absmax),
                          reinterpret_cast<int8_t*>(dst));
}

// The power of two 2^e with absmax / 2^e in (16319.5, 32639], the largest range whose high digits
// fit into int8. It is at least 2^-126, so that its inverse is finite. NaN if absmax is NaN.
inline float int16_scale(float absmax) {
  uint32_t bits;
  __builtin_memcpy(&bits, &absmax, 4);
  if (absmax != absmax) return absmax;
  // With x the biased exponent, absmax < 2^(x - 126). It fits 2^15 with e = x - 126 - 15 or one
  // more.
  int32_t e = int32_t(bits >> 23) - 126 - 15;
  if (e < -126) e = -126;
  const auto power = [](int32_t exponent) {
    const uint32_t word = uint32_t(exponent + 127) << 23;
    float value;
    __builtin_memcpy(&value, &word, 4);
    return value;
  };
  return power(absmax > 32639.0f * power(e) ? e + 1 : e);
}

void quantise_int16_groups(const void* src, DType type, int64_t k, int64_t k_padded, float,
                           uint8_t* dst, float* scale, int32_t* sum) {
  constexpr int kVectors = kActGroup / kLanes, kSumVectors = kSumGroup / kLanes;
  auto* digits = reinterpret_cast<int8_t*>(dst);
  for (int64_t i = 0; i < k_padded; i += kActGroup, digits += 2 * kActGroup) {
    F x[kVectors];
    I most = i_zero();
    for (int v = 0; v < kVectors; ++v) {
      x[v] = round_bf16(load_row(src, type, i + v * kLanes, k));
      most = i_max(most, i_and(as_i(x[v]), i_set(0x7fffffff)));
    }
    const float unit = *scale++ = int16_scale(absmax_lanes(most));
    const bool finite = unit == unit;
    const F inverse = f_set(finite ? 1.0f / unit : 0.0f);
    I q[kVectors], high[kVectors], low[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      q[v] = finite ? round_i(f_mul(x[v], inverse)) : i_zero();
      high[v] = i_sra<8>(i_add(q[v], i_set(128)));
      low[v] = i_sub(q[v], i_sll<8>(high[v]));
    }
    i_store_i8x32(digits, high);
    i_store_i8x32(digits + kActGroup, low);
    for (int v = 0; v < kVectors; v += kSumVectors) {
      I total = q[v];
      if constexpr (kSumVectors == 2) total = i_add(total, q[v + 1]);
      *sum++ = sum_lanes(total);
    }
  }
}

void quantise_float(const void* src, DType type, int64_t k, int64_t k_padded, float, uint8_t* dst,
                    float*, int32_t*) {
  for (int64_t i = 0; i < k_padded; i += kLanes)
    f_store(reinterpret_cast<float*>(dst) + i, round_bf16(load_row(src, type, i, k)));
}

void quantise_bf16(const void* src, DType type, int64_t k, int64_t k_padded, float, uint8_t* dst,
                   float*, int32_t*) {
  for (int64_t i = 0; i < k_padded; i += kLanes)
    store_bf16(reinterpret_cast<uint16_t*>(dst) + i, load_row(src, type, i, k));
}
