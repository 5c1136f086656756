// The scales and codes of ggml's formats for GroupBlock, derived from their rows in kt/format.h.

// Scales of 32 columns, or of twice 16, with what is added to each weight.
template <int n> struct AffineScales {
  AffineScale part[n];
  inline F add(const F (&dot)[n], const F (&sum)[n], F unit, F total) const {
    F y[n];
    for (int p = 0; p < n; ++p) y[p] = f_fma(sum[p], part[p].bias, f_mul(dot[p], part[p].scale));
    return f_fma(n == 1 ? y[0] : f_add(y[0], y[n - 1]), unit, total);
  }
};

template <CodeType type, int bits> struct CodesOf { using Codes = PlaneCodes<bits>; };
template <> struct CodesOf<CodeType::kSigned, 8> { using Codes = SignedByteCodes; };
template <> struct CodesOf<CodeType::kIq4, 4> { using Codes = Iq4Codes; };

template <WeightFormat format> struct GgmlScales {
  static constexpr WeightFormat kFormat = format;
  static constexpr const FormatTraits& kForm = traits_of(format);
  using Codes = typename CodesOf<kForm.codes.type, kForm.codes.bits>::Codes;
  static constexpr int kOffset = kForm.codes.offset + Codes::kCodeOffset;
  static constexpr int64_t kScaleBytes = kForm.scale_bytes;
  static constexpr int kSums = kForm.scales.cols == 16 ? 2 : 1;

  const uint8_t* block;
  inline GgmlScales(const uint8_t* b, const MatrixLayout&) : block(b) {}

  inline auto at(int64_t i, int v) const {
    AffineScales<kSums> scales;
    for (int p = 0; p < kSums; ++p)
      scales.part[p] = ggml_scale<format>(block, i * kSums + p, v * kLanes);
    // The offset is subtracted from the integers.
    if constexpr (kForm.scales.minimum)
      return scales;
    else if constexpr (kSums == 1)
      return OneScale{scales.part[0].scale};
    else
      return TwoScales{scales.part[0].scale, scales.part[1].scale};
  }
  template <int M> static inline void finish(const uint8_t*, F (&)[M][kTileVectors]) {}
};
