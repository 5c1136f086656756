// Weights in the formats of ggml: what they are for GroupBlock, from their traits (GgmlFormat).

// Scales of 32 columns, or of 16 and 16, with what is added to each weight.
template <int n> struct AffineScales {
  AffineScale part[n];
  inline F add(const F (&dot)[n], const F (&sum)[n], F unit, F total) const {
    F y[n];
    for (int p = 0; p < n; ++p) y[p] = f_fma(sum[p], part[p].bias, f_mul(dot[p], part[p].scale));
    return f_fma(n == 1 ? y[0] : f_add(y[0], y[n - 1]), unit, total);
  }
};

template <WeightFormat format> struct CodesOf {
  using type = PlaneCodes<ggml_format(format).bits>;
};
template <> struct CodesOf<WeightFormat::kQ8_0> { using type = SignedByteCodes; };
template <> struct CodesOf<WeightFormat::kIQ4NL> { using type = Iq4Codes; };
template <> struct CodesOf<WeightFormat::kIQ4XS> { using type = Iq4Codes; };

template <WeightFormat format> struct GgmlScales {
  static constexpr GgmlFormat kForm = ggml_format(format);
  using Codes = typename CodesOf<format>::type;
  static constexpr int kOffset = kForm.offset + Codes::kCodeOffset;
  static constexpr int64_t kScaleBytes = kForm.scale_bytes();
  static constexpr int kSums = kForm.sub_cols == 16 ? 2 : 1;

  const uint8_t* block;
  inline GgmlScales(const uint8_t* b, const MatrixLayout&) : block(b) {}

  inline auto at(int64_t i, int v) const {
    AffineScales<kSums> scales;
    for (int p = 0; p < kSums; ++p)
      scales.part[p] = ggml_scale<format>(block, i * kSums + p, v * kLanes);
    // The offset is taken off the integers.
    if constexpr (kForm.has_min)
      return scales;
    else if constexpr (kSums == 1)
      return OneScale{scales.part[0].scale};
    else
      return TwoScales{scales.part[0].scale, scales.part[1].scale};
  }
  template <int M> static inline void finish(const uint8_t*, F (&)[M][kTileVectors]) {}
};
