// Loads and stores of the tensors' element types as 32-bit lanes. bf16 is stored with
// round-to-nearest-even; NaN stays NaN.
inline F load_as_float(const void* p, DType type) {
  const auto* half = static_cast<const uint16_t*>(p);
  switch (type) {
    case DType::kBF16: return as_f(i_sll<16>(i_load_u16(half)));
    case DType::kFP16: return f_load_fp16(half);
    default: return f_load(static_cast<const float*>(p));
  }
}

// x rounded to bf16, as a float: the upper half of each lane, with zeros in the lower half.
inline F round_bf16(F x) {
  const I bits = as_i(x);
  const I odd = i_and(i_srl<16>(bits), i_set(1));
  const I rounded = i_and(i_add(i_add(bits, i_set(0x7fff)), odd), i_set(int32_t(0xffff0000)));
  return f_or_nan(as_f(rounded), x, as_f(i_set(0x7fc00000)));
}

inline void store_bf16(uint16_t* p, F x) { i_store_u16(p, i_srl<16>(as_i(round_bf16(x)))); }

inline void store_as(void* p, DType type, F x) {
  auto* half = static_cast<uint16_t*>(p);
  switch (type) {
    case DType::kBF16: return store_bf16(half, x);
    case DType::kFP16: return f_store_fp16(half, x);
    default: return f_store(static_cast<float*>(p), x);
  }
}

// Elements [i, i + kLanes) of a row of k; zeros past its end.
inline F load_row(const void* row, DType type, int64_t i, int64_t k) {
  const int64_t bytes = dtype_bytes(type);
  const auto* p = static_cast<const uint8_t*>(row) + i * bytes;
  if (i + kLanes <= k) return load_as_float(p, type);
  if (i >= k) return f_zero();
  alignas(64) uint8_t padded[kLanes * 4] = {};
  __builtin_memcpy(padded, p, size_t((k - i) * bytes));
  return load_as_float(padded, type);
}

// Stores the first n (<= kLanes) lanes of x.
inline void store_some(void* p, DType type, F x, int64_t n) {
  if (n >= kLanes) return store_as(p, type, x);
  alignas(64) uint8_t all[kLanes * 4];
  store_as(all, type, x);
  __builtin_memcpy(p, all, size_t(n * dtype_bytes(type)));
}
