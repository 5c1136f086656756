// The packed weight layouts: the specification of every byte that pack/ writes and that the kernels
// in isa/ read. Layouts do not depend on the instruction set. A format is one row of kFormats;
// docs/adding-a-format.md lists what else a new format needs.
//
// A matrix W [N rows, K columns] is stored as ceil(N/32) tiles of 32 rows. A tile is one contiguous
// stream in ascending k, aligned to 64 bytes: a head, then blocks of columns. Each block has its
// scales first and then its codes. K is padded to whole blocks.
//
// Codes are stored in steps. "Lane n" is row n of the tile (0..31), so a step has 32 lanes of 4
// bytes = 128 bytes: two 16-column AMX B tiles side by side (row stride 128), two 512-bit vectors,
// or four 256-bit vectors. A step of p-bit codes holds 32 / p columns:
//
//   16-bit step  2 k: lane n = { W[n,k], W[n,k+1] }
//   8-bit step   4 k: lane n = { q[n,k], q[n,k+1], q[n,k+2], q[n,k+3] }; e4m3 codes in the order
//                k, k+2, k+1, k+3, so that the even and the odd bytes are 16-bit pairs of columns
//   4-bit step   8 k: byte b of lane n = q[n,k+b] | q[n,k+4+b] << 4
//   2-bit step   16 k: byte b of lane n = OR of q[n,k+4j+b] << 2j for j = 0..3
//   1-bit step   32 k: byte b of lane n = OR of q[n,k+4j+b] << j for j = 0..7
//
// For every p, (lane >> p * j) & mask is therefore the codes of the four columns 4j to 4j+3, one
// per byte. Codes of 3, 5 and 6 bits are stored in two "planes": for each 32 columns, first the
// steps of their low 2, 4 and 4 bits, then the steps of the remaining bits.
//
// W = value of the code * scale, according to CodeType and ScaleKind. With zero points, the value
// is the code minus the zero point of its row or group. In ggml's formats, products are exact in
// float32, so W in float32 is rounded at most once, and only in formats with a minimum.
//
// Rows past N and columns past K are padding that dequantises to 0: the code of value 0 (with zero
// points, code 0 and zero point 0) and scales of 0. ue8m0 scales have no zero; their padding is 127
// (1.0). Padding of heads and of ggml's formats is zero bytes.
//
// The memory of one expert in one pool is: gate tile 0, up tile 0, gate tile 1, up tile 1, ...
// (K = H, rows = the pool's part of I), then the down tiles (K = the pool's part of I, rows = H).
#pragma once
#include <cstdint>

namespace kt {

// Changes with any packed byte, so that packed files in another layout are recognised. The expected
// bytes in tests/kernels/test_pack_golden.py may change only together with this number.
constexpr int kLayoutVersion = 2;

// Packed files store these numbers, so they never change. A new format gets the next number.
enum class WeightFormat : int {
  kBF16 = 0,
  kInt8Row = 1,
  kInt4Row = 2,
  kInt4Group = 3,
  kInt4Zero = 4,
  kFp8Block = 5,
  kFp8Row = 6,
  kMxFp8 = 7,
  kMxFp4 = 8,
  kNvFp4 = 9,
  kQ4_1 = 10,
  kQ5_0 = 11,
  kQ5_1 = 12,
  kQ8_0 = 13,
  kQ2K = 14,
  kQ3K = 15,
  kQ4K = 16,
  kQ5K = 17,
  kQ6K = 18,
  kIQ4NL = 19,
  kIQ4XS = 20,
  kCount
};
constexpr int kFormatCount = int(WeightFormat::kCount);

// The type of the scales of ScaleKind::kGroup, the same as in the source.
enum class ScaleType : int { kFP16 = 0, kBF16 = 1, kFP32 = 2 };

constexpr int64_t kTileRows = 32;  // rows of a tile
constexpr int64_t kFp8BlockSize = 128;
// Largest H and I. The int32 sum of a row's products must not overflow, even with activations
// offset to 0..255 (isa/simd_avx512.inl).
constexpr int64_t kMaxColumns = 65536;
static_assert(255 * 128 * kMaxColumns < (int64_t{1} << 31));
constexpr int64_t kStepBytes = 128;  // 32 lanes of 4 bytes

// Always inlines functions that the isa/ objects call. The linker could otherwise choose a shared
// out-of-line copy that was compiled for another instruction set.
#define KT_INLINE [[gnu::always_inline]] constexpr

KT_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
KT_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Bits of the first plane of codes. The second plane has the other bits.
KT_INLINE int low_plane_bits(int bits) { return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits; }

// The value of a code.
enum class CodeType : int {
  kBf16,      // the code is the weight in bfloat16
  kSigned,    // two's complement
  kUnsigned,  // the code minus the format's offset
  kE4m3,      // OFP8 1.0, "fn": no infinities; 0x7f and 0xff are NaN, refused when packing
  kE2m1,      // OCP MX 1.0: codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign
  kIq4,       // kIq4Values
};
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};

// The columns of the bytes in a step of e4m3.
constexpr int kE4m3Order[4] = {0, 2, 1, 3};

// The scales of a format and their position. All are finite. Only those of integer codes may be
// negative.
enum class ScaleKind : int {
  kNone,
  kRow,    // head: float32 scale[32]
  kBlock,  // head: float32 scale[ceil(K / 128)], padded to 64 bytes. A scale is for 128 rows by 128
           // columns, or fewer at the matrix's edges
  kGroup,  // block: scale[32] of the layout's ScaleType
  kUe8m0,  // block: uint8 scale[32] for each `cols` columns, at most 254, meaning 2^(scale - 127)
           // (OCP MX 1.0)
  kE4m3,   // block: e4m3 scale[32] for each `cols` columns, without sign bit. Head: a float32 that
           // multiplies all of them, padded to 64 bytes
  kGgml,   // block: fp16 d[32]; with a minimum, fp16 m[32]; then for each `cols` columns integers s
           // and, with a minimum, t: int8 s[32], or uint8 s[32] and uint8 t[32], or for bits = 4
           // uint8 (s | t << 4)[32]. W = d s value - m t, or d value + m without s and t
};

struct FormatTraits {
  struct Codes {
    CodeType type;
    int bits;
    int offset = 0;  // of kUnsigned
  };
  struct Scales {
    ScaleKind kind = ScaleKind::kNone;
    int cols = 0;  // columns per scale of kUe8m0 and kE4m3, and per s of kGgml (0: no s)
    int bits = 8;  // of kGgml's s and t; with 6, an int8 s is -32 to 31, and a uint8 is at most 63
    // kRow: the head has, after the scales, int32 sum[32] of each row's codes, for kernels that
    // offset activations to unsigned.
    bool sums = false;
    // kGroup: a block has, after its scales, uint8 zero[32], at most 16, and 32 zero bytes.
    bool zero = false;
    bool minimum = false;  // kGgml
  };

  WeightFormat format;
  const char* name;          // in Python
  const char* title = name;  // in messages, tables and tuning files
  Codes codes;
  Scales scales = {};
  int block_cols = 0;       // 0: the group, a multiple of 32
  int file_bytes = 0;       // kGgml: bytes of a row's block in a GGUF file (ggml-common.h of ggml)
  bool from_dense = false;  // whether pack/ also quantises dense weights to it

  // kGgml: bytes per row of an s with its t, of d and m, and of the codes of 32 columns.
  KT_INLINE int sub_bytes() const { return scales.minimum && scales.bits > 4 ? 2 : 1; }
  KT_INLINE int64_t d_bytes() const {
    return scales.kind == ScaleKind::kGgml ? kTileRows * 2 * (scales.minimum ? 2 : 1) : 0;
  }
  KT_INLINE int64_t part_bytes() const { return codes.bits * kStepBytes; }

  // The rest is derived from the above. K must be a multiple of this and, for kGroup, of the group.
  int column_unit = scales.kind == ScaleKind::kGgml    ? block_cols
                    : scales.kind == ScaleKind::kGroup ? 32
                    : scales.cols                      ? scales.cols
                                                       : 1;
  // Bytes of a tile's head. kBlock's also depend on K.
  int64_t head_bytes = scales.kind == ScaleKind::kRow    ? kTileRows * (scales.sums ? 8 : 4)
                       : scales.kind == ScaleKind::kE4m3 ? 64
                                                         : 0;
  // Bytes of a block's scales, without those of kGroup, which depend on the layout's ScaleType.
  int64_t scale_bytes = d_bytes() +
                        (scales.cols ? block_cols / scales.cols * sub_bytes() * kTileRows : 0) +
                        (scales.zero ? 64 : 0);
};

// In the order of WeightFormat. Not `inline`, because the isa/ objects must not share a symbol.
constexpr FormatTraits kFormats[] = {
    {.format = WeightFormat::kBF16,
     .name = "BF16",
     .codes = {.type = CodeType::kBf16, .bits = 16},
     .block_cols = 32,
     .from_dense = true},
    {.format = WeightFormat::kInt8Row,
     .name = "INT8_ROW",
     .title = "int8 with row scales",
     .codes = {.type = CodeType::kSigned, .bits = 8},
     .scales = {.kind = ScaleKind::kRow, .sums = true},
     .block_cols = 64,
     .from_dense = true},
    {.format = WeightFormat::kInt4Row,
     .name = "INT4_ROW",
     .title = "int4 with row scales",
     .codes = {.type = CodeType::kUnsigned, .bits = 4, .offset = 8},
     .scales = {.kind = ScaleKind::kRow},
     .block_cols = 64,
     .from_dense = true},
    {.format = WeightFormat::kInt4Group,
     .name = "INT4_GROUP",
     .title = "int4 with group scales",
     .codes = {.type = CodeType::kUnsigned, .bits = 4, .offset = 8},
     .scales = {.kind = ScaleKind::kGroup},
     .from_dense = true},
    {.format = WeightFormat::kInt4Zero,
     .name = "INT4_ZERO",
     .title = "int4 with group scales and zero points",
     .codes = {.type = CodeType::kUnsigned, .bits = 4},
     .scales = {.kind = ScaleKind::kGroup, .zero = true}},
    {.format = WeightFormat::kFp8Block,
     .name = "FP8_BLOCK",
     .title = "FP8 with scales per 128x128 block",
     .codes = {.type = CodeType::kE4m3, .bits = 8},
     .scales = {.kind = ScaleKind::kBlock},
     .block_cols = 64},
    {.format = WeightFormat::kFp8Row,
     .name = "FP8_ROW",
     .title = "FP8 with row scales",
     .codes = {.type = CodeType::kE4m3, .bits = 8},
     .scales = {.kind = ScaleKind::kRow},
     .block_cols = 64},
    {.format = WeightFormat::kMxFp8,
     .name = "MXFP8",
     .codes = {.type = CodeType::kE4m3, .bits = 8},
     .scales = {.kind = ScaleKind::kUe8m0, .cols = 32},
     .block_cols = 64},
    {.format = WeightFormat::kMxFp4,
     .name = "MXFP4",
     .codes = {.type = CodeType::kE2m1, .bits = 4},
     .scales = {.kind = ScaleKind::kUe8m0, .cols = 32},
     .block_cols = 64},
    {.format = WeightFormat::kNvFp4,
     .name = "NVFP4",
     .codes = {.type = CodeType::kE2m1, .bits = 4},
     .scales = {.kind = ScaleKind::kE4m3, .cols = 16},
     .block_cols = 32},
    {.format = WeightFormat::kQ4_1,
     .name = "Q4_1",
     .codes = {.type = CodeType::kUnsigned, .bits = 4},
     .scales = {.kind = ScaleKind::kGgml, .minimum = true},
     .block_cols = 32,
     .file_bytes = 20},
    {.format = WeightFormat::kQ5_0,
     .name = "Q5_0",
     .codes = {.type = CodeType::kUnsigned, .bits = 5, .offset = 16},
     .scales = {.kind = ScaleKind::kGgml},
     .block_cols = 32,
     .file_bytes = 22},
    {.format = WeightFormat::kQ5_1,
     .name = "Q5_1",
     .codes = {.type = CodeType::kUnsigned, .bits = 5},
     .scales = {.kind = ScaleKind::kGgml, .minimum = true},
     .block_cols = 32,
     .file_bytes = 24},
    {.format = WeightFormat::kQ8_0,
     .name = "Q8_0",
     .codes = {.type = CodeType::kSigned, .bits = 8},
     .scales = {.kind = ScaleKind::kGgml},
     .block_cols = 32,
     .file_bytes = 34},
    {.format = WeightFormat::kQ2K,
     .name = "Q2_K",
     .codes = {.type = CodeType::kUnsigned, .bits = 2},
     .scales = {.kind = ScaleKind::kGgml, .cols = 16, .bits = 4, .minimum = true},
     .block_cols = 256,
     .file_bytes = 84},
    {.format = WeightFormat::kQ3K,
     .name = "Q3_K",
     .codes = {.type = CodeType::kUnsigned, .bits = 3, .offset = 4},
     .scales = {.kind = ScaleKind::kGgml, .cols = 16, .bits = 6},
     .block_cols = 256,
     .file_bytes = 110},
    {.format = WeightFormat::kQ4K,
     .name = "Q4_K",
     .codes = {.type = CodeType::kUnsigned, .bits = 4},
     .scales = {.kind = ScaleKind::kGgml, .cols = 32, .bits = 6, .minimum = true},
     .block_cols = 256,
     .file_bytes = 144},
    {.format = WeightFormat::kQ5K,
     .name = "Q5_K",
     .codes = {.type = CodeType::kUnsigned, .bits = 5},
     .scales = {.kind = ScaleKind::kGgml, .cols = 32, .bits = 6, .minimum = true},
     .block_cols = 256,
     .file_bytes = 176},
    {.format = WeightFormat::kQ6K,
     .name = "Q6_K",
     .codes = {.type = CodeType::kUnsigned, .bits = 6, .offset = 32},
     .scales = {.kind = ScaleKind::kGgml, .cols = 16},
     .block_cols = 256,
     .file_bytes = 210},
    {.format = WeightFormat::kIQ4NL,
     .name = "IQ4_NL",
     .codes = {.type = CodeType::kIq4, .bits = 4},
     .scales = {.kind = ScaleKind::kGgml},
     .block_cols = 32,
     .file_bytes = 18},
    {.format = WeightFormat::kIQ4XS,
     .name = "IQ4_XS",
     .codes = {.type = CodeType::kIq4, .bits = 4},
     .scales = {.kind = ScaleKind::kGgml, .cols = 32, .bits = 6},
     .block_cols = 256,
     .file_bytes = 136},
};

KT_INLINE const FormatTraits& traits_of(WeightFormat format) { return kFormats[int(format)]; }
KT_INLINE bool is_ggml(WeightFormat format) {
  return traits_of(format).scales.kind == ScaleKind::kGgml;
}

// These checks reject, at compile time, inconsistent rows, and combinations of codes and scales
// that pack/ cannot write.
constexpr bool same_text(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}
constexpr bool good_names(const FormatTraits& f) {
  for (const FormatTraits& other : kFormats)
    if (&other != &f && (same_text(f.name, other.name) || same_text(f.title, other.title)))
      return false;
  return *f.name && *f.title;
}
constexpr bool good_codes(const FormatTraits& f) {
  const auto [type, bits, offset] = f.codes;
  const bool ggml = is_ggml(f.format);
  if (offset && (type != CodeType::kUnsigned || offset < 0 || offset >= 1 << bits)) return false;
  switch (type) {
    case CodeType::kBf16: return bits == 16 && f.scales.kind == ScaleKind::kNone;
    case CodeType::kSigned: return bits == 8;
    case CodeType::kUnsigned: return ggml ? bits >= 2 && bits <= 6 : bits == 4;
    case CodeType::kE4m3: return bits == 8 && !ggml;
    case CodeType::kE2m1: return bits == 4 && !ggml;
    case CodeType::kIq4: return bits == 4 && ggml;
  }
  return false;
}
// Checks which fields of `scales` are used, and the sizes that the kernels and pack/ rely on.
constexpr bool good_scales(const FormatTraits& f) {
  const FormatTraits::Scales& s = f.scales;
  const bool groups = s.kind == ScaleKind::kGroup, ggml = is_ggml(f.format);
  if (groups ? f.block_cols != 0 : f.block_cols <= 0 || f.block_cols % 32 != 0) return false;
  if (s.sums && (s.kind != ScaleKind::kRow || f.codes.type != CodeType::kSigned)) return false;
  if (s.zero && (!groups || f.codes.type != CodeType::kUnsigned || f.codes.offset)) return false;
  if (s.minimum && !ggml) return false;
  if (s.bits != 8 && !(ggml && s.cols && (s.bits == 6 || (s.bits == 4 && s.minimum)))) return false;
  if (f.scale_bytes % 64 != 0) return false;
  switch (s.kind) {
    case ScaleKind::kNone: return s.cols == 0 && f.codes.type == CodeType::kBf16;
    case ScaleKind::kUe8m0:
    case ScaleKind::kE4m3: return f.block_cols == 2 * s.cols;
    case ScaleKind::kGgml: return s.cols == 0 ? f.block_cols == 32 : s.cols == 16 || s.cols == 32;
    default: return s.cols == 0;
  }
}
// The formats to which pack/ quantises dense weights.
constexpr bool good_source(const FormatTraits& f) {
  const bool int4 = f.codes.type == CodeType::kUnsigned && f.codes.offset == 8 && !f.scales.zero;
  switch (f.scales.kind) {
    case ScaleKind::kNone: return f.from_dense;
    case ScaleKind::kRow: return !f.from_dense || int4 || f.scales.sums;
    case ScaleKind::kGroup: return !f.from_dense || int4;
    default: return !f.from_dense;
  }
}
// Packed blocks of ggml's formats are as large as in a file, except that 6-bit s and t take a byte.
constexpr bool good_bytes(const FormatTraits& f) {
  const int64_t subs = f.scales.cols ? f.block_cols / f.scales.cols * f.sub_bytes() : 0;
  const int64_t widened = f.scales.bits == 6 ? subs * 2 / 8 : 0;
  const int64_t packed = f.scale_bytes + f.block_cols / 32 * f.part_bytes();
  return is_ggml(f.format) ? packed == kTileRows * (f.file_bytes + widened) : f.file_bytes == 0;
}
constexpr bool every_format(bool (*good)(const FormatTraits&)) {
  for (const FormatTraits& f : kFormats)
    if (!good(f)) return false;
  return true;
}
static_assert(sizeof kFormats / sizeof *kFormats == kFormatCount, "one row per format");
static_assert(every_format([](const FormatTraits& f) { return &traits_of(f.format) == &f; }),
              "rows in the order of WeightFormat");
static_assert(every_format(good_names), "the names of a row, each used once");
static_assert(every_format(good_codes), "the codes of a row");
static_assert(every_format(good_scales), "the scales of a row");
static_assert(every_format(good_bytes), "the bytes of a row");
static_assert(every_format(good_source), "the sources of a row");

}  // namespace kt
