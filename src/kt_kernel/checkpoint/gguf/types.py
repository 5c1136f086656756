"""ggml's tensor types, by their numbers in GGUF files.

Block sizes and the positions of scales are those of ggml's structs
(https://github.com/ggml-org/ggml, src/ggml-common.h). The numbers are those of enum ggml_type
(include/ggml.h).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """Rows consist of blocks of `columns` values in `size` bytes. scales: byte offsets of the
    block's float16 numbers that multiply its codes or are added to them."""

    name: str
    columns: int
    size: int
    scales: tuple[int, ...] = ()


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18, (0,)),
    3: GgmlType("Q4_1", 32, 20, (0, 2)),
    6: GgmlType("Q5_0", 32, 22, (0,)),
    7: GgmlType("Q5_1", 32, 24, (0, 2)),
    8: GgmlType("Q8_0", 32, 34, (0,)),
    10: GgmlType("Q2_K", 256, 84, (80, 82)),
    11: GgmlType("Q3_K", 256, 110, (108,)),
    12: GgmlType("Q4_K", 256, 144, (0, 2)),
    13: GgmlType("Q5_K", 256, 176, (0, 2)),
    14: GgmlType("Q6_K", 256, 210, (208,)),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18, (0,)),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136, (0,)),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

#: Types that ggml has removed from files, or only uses during computation.
NOT_STORED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

BY_NAME: dict[str, GgmlType] = {kind.name: kind for kind in TYPES.values()}
