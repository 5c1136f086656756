// B of the tile kernels with bf16 products (gemm_amx.inl).

struct Bf16Units : PackedUnits<false> {
  Bf16Units(const uint8_t* tile, const MatrixLayout&) : PackedUnits{tile} {}
  void finish(const ActRows&, int64_t, float*) const {}
};
