// Reads the codes of ggml's formats from their planes (kt/format.h), four columns at a time: the
// unsigned codes of quad `quad` (0 to 7) of 32 columns, in the four bytes of each lane.

constexpr uint32_t plane_mask(int bits) { return 0x01010101u * ((1u << bits) - 1); }

// The bits of a quad in one plane, moved to bit `to` of each byte.
template <int bits, int quad, int to = 0> inline I plane_quad(const uint8_t* plane, int lane) {
  constexpr int kQuads = 8 / bits, kShift = quad % kQuads * bits - to;
  const I x = i_load(plane + quad / kQuads * kStepBytes + lane * 4);
  if constexpr (bits == 8) return x;
  const I mask = i_set(int32_t(plane_mask(bits) << to));
  if constexpr (kShift < 0) return i_and(i_sll<-kShift>(x), mask);
  return i_and(i_srl<(kShift > 0 ? kShift : 0)>(x), mask);
}

template <int bits, int quad> inline I part_quad(const uint8_t* part, int lane) {
  constexpr int kLow = low_plane_bits(bits);
  const I low = plane_quad<kLow, quad>(part, lane);
  if constexpr (bits == kLow)
    return low;
  else
    return i_or(low, plane_quad<bits - kLow, quad, kLow>(part + kLow * kStepBytes, lane));
}

// W = q * scale + bias, for the codes q of one sub-block and one vector of rows. Only the last
// rounding is inexact.
struct AffineScale {
  F scale, bias;
};

template <WeightFormat format>
inline AffineScale ggml_scale(const uint8_t* block, int64_t sub, int lane) {
  constexpr const FormatTraits& kForm = traits_of(format);
  const auto* halves = reinterpret_cast<const uint16_t*>(block) + lane;
  F scale = f_load_fp16(halves), bias = f_zero();
  if constexpr (kForm.scales.minimum) bias = f_load_fp16(halves + kTileRows);
  if constexpr (kForm.scales.cols > 0) {
    const uint8_t* p = block + kForm.d_bytes() + sub * kForm.sub_bytes() * kTileRows + lane;
    const I byte = i_load_u8(p);
    if constexpr (!kForm.scales.minimum) {
      scale = f_mul(scale, to_f(i_load_i8(p)));
    } else if constexpr (kForm.sub_bytes() == 2) {
      scale = f_mul(scale, to_f(byte));
      bias = f_fnma(bias, to_f(i_load_u8(p + kTileRows)), f_zero());
    } else {
      scale = f_mul(scale, to_f(i_and(byte, i_set(15))));
      bias = f_fnma(bias, to_f(i_srl<4>(byte)), f_zero());
    }
  }
  if constexpr (kForm.codes.offset > 0) bias = f_mul(scale, f_set(-kForm.codes.offset));
  return {scale, bias};
}

template <WeightFormat format>
constexpr bool kHasBias = traits_of(format).scales.minimum || traits_of(format).codes.offset > 0;
template <WeightFormat format>
constexpr bool kIsIq4 = traits_of(format).codes.type == CodeType::kIq4;

template <WeightFormat format> inline F ggml_value(F q, const AffineScale& a) {
  if constexpr (kHasBias<format>)
    return f_fma(q, a.scale, a.bias);
  else
    return f_mul(q, a.scale);
}
