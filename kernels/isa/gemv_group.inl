// 4-bit weights with a scale per group, vector units: activations in fixed point (kernel_table.h,
// kInt16Group), so that products are integer; one int32 accumulator per 32 columns, those added in
// float32.
inline F load_scales(const uint8_t* p, ScaleType type, int lane) {
  switch (type) {
    case ScaleType::kFP16: return f_load_fp16(reinterpret_cast<const uint16_t*>(p) + lane);
    case ScaleType::kBF16:
      return as_f(i_sll<16>(i_load_u16(reinterpret_cast<const uint16_t*>(p) + lane)));
    default: return f_load(reinterpret_cast<const float*>(p) + lane);
  }
}

struct Int4GroupBlock {
  static constexpr int kMaxRows = 4, kVectors = kLanes == 16 ? 2 : 1;
  template <int M, int V>
  static inline void run(const uint8_t* tile, const MatrixLayout& layout, const ActRows& a,
                         const Rows<M>& rows, int lane, float* out) {
    F total[M][V];
    for (auto& row : total)
      for (F& x : row) x = f_zero();
    const int64_t steps = layout.group / 8, groups = layout.cols_padded() / layout.group;
    const uint8_t* group = tile;
    for (int64_t g = 0; g < groups; ++g, group += layout.block_bytes()) {
      const uint8_t* w = group + layout.block_scale_bytes() + lane * 4;
      F scale[V];
      for (int v = 0; v < V; ++v) scale[v] = load_scales(group, layout.scale, lane + v * kLanes);
      for (int64_t s = 0; s < steps; s += 4, w += 4 * kStepBytes) {
        const int64_t part = (g * layout.group + s * 8) / kActGroup;
        I high[M][V], low[M][V];
        for (int r = 0; r < M; ++r) {
          const int32_t* sum = a.sum + rows.id[r] * a.sums + part * 2;
          for (I& x : low[r]) x = i_set(-8 * (sum[0] + sum[1]));
          for (I& x : high[r]) x = i_zero();
        }
        Rows<M> digits = rows;
        for (auto& p : digits.a) p += part * 2 * kActGroup;
        nibble_steps<M, V>(w, 4, digits, 0, high);
        nibble_steps<M, V>(w, 4, digits, kActGroup, low);
        for (int r = 0; r < M; ++r) {
          const F unit = f_set(a.scale[rows.id[r] * a.scales + part]);
          for (int v = 0; v < V; ++v) {
            const F both = f_mul(scale[v], unit);
            total[r][v] =
                f_fma(to_f(i_add(i_sll<8>(high[r][v]), low[r][v])), both, total[r][v]);
          }
        }
      }
    }
    for (int r = 0; r < M; ++r)
      for (int v = 0; v < V; ++v) f_store(out + r * kTileRows + v * kLanes, total[r][v]);
  }
};
