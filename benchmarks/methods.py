"""The weight methods: how the core stores each, random weights for it, its limits and its goals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from shapes import SEED, Shape

FP16, BF16, FP32 = range(3)  # kt::ScaleType
DENSE_TYPES = {"FP16": torch.float16, "FP32": torch.float32}
# Types of checkpoints for methods that quantise while loading; others have their own format.
SOURCES = ("BF16", *DENSE_TYPES, "FP8", "FP8_PERCHANNEL")
TABLES_BY_UNIT = {  # kernel table: unit of int8 products, unit of float products
    "amx": ("amx_int8", "amx_bf16"),
    "avx512_bf16": ("avx512_vnni_int8", "avx512_fp32"),
    "avx512_vbmi": ("avx512_vnni_int8", "avx512_fp32"),
    "avx512_vnni": ("avx512_vnni_int8", "avx512_fp32"),
    "avx512": ("avx512_int8_maddubs", "avx512_fp32"),
    "avx2": ("avx2_int8_maddubs", "avx2_fp32"),
}


@dataclass(frozen=True)
class Source:
    """One matrix [N, K] in the form of WeightSource (kernels/pack/pack.h)."""

    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    factor: float = 1.0  # "global"

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.data, self.scale, self.zero) if t is not None]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def addresses(self) -> tuple[int, int, int, float]:
        scale, zero = (0 if t is None else t.data_ptr() for t in (self.scale, self.zero))
        return self.data.data_ptr(), scale, zero, self.factor

    def clone(self) -> Source:
        copies = (None if t is None else t.clone() for t in (self.data, self.scale, self.zero))
        return Source(*copies, self.factor)


@dataclass(frozen=True)
class Method:
    """bits: per weight, including scales. make: returns random weights of [N, K]."""

    name: str
    format: str  # of kt_kernel.weights.formats
    bits: float
    make: Callable[[int, int], Source]
    group: int = 0
    scale_type: int = FP16
    ggml: bool = False  # whether it is one of ggml's formats

    @property
    def form(self) -> tuple[int, int, int]:
        """The arguments of the compiled core."""
        from kt_kernel.weights.formats import (  # kt-kernel's process does not have it
            WeightForm,
            WeightFormat,
        )

        return WeightForm(WeightFormat(self.format), self.group, self.scale_type).core

    @property
    def dense(self) -> bool:
        """Packed from bf16 weights."""
        return self.make is _dense

    @property
    def per_row_integer(self) -> bool:
        return self.format in ("INT8_ROW", "INT4_ROW")

    @property
    def eight_bit_float(self) -> bool:
        return self.format in ("FP8_BLOCK", "FP8_ROW", "MXFP8")


def _dense(n: int, k: int) -> Source:
    return Source((torch.randn(n, k) * k**-0.5).to(torch.bfloat16))


# Quantised weights are about N(0, 1/K), too. All scales are equal, since values do not affect time.


def _e4m3(n: int, k: int) -> torch.Tensor:
    return (torch.randn(n, k) * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def _fp8(n: int, k: int) -> Source:
    return Source(_e4m3(n, k), torch.full((-(-n // 128), -(-k // 128)), k**-0.5 / 64))


def _fp8_row(n: int, k: int) -> Source:
    return Source(_e4m3(n, k), torch.full((n,), k**-0.5 / 64))


def _exponent(scale: float) -> int:
    return 127 + round(math.log2(scale))  # ue8m0


def _mxfp8(n: int, k: int) -> Source:
    exponent = _exponent(k**-0.5 / 64)
    return Source(_e4m3(n, k), torch.full((n, k // 32), exponent, dtype=torch.uint8))


def _nibbles(n: int, k: int) -> torch.Tensor:
    u = (torch.randn(n, k) * 2.5 + 8).round().clamp(0, 15).to(torch.uint8)
    return u[:, 0::2] | u[:, 1::2] << 4


def _int4(group: int, dtype: torch.dtype, zero: bool) -> Callable[[int, int], Source]:
    def make(n: int, k: int) -> Source:
        groups = (n, k // group)
        zeros = torch.full(groups, 8, dtype=torch.uint8) if zero else None
        return Source(_nibbles(n, k), torch.full(groups, k**-0.5 / 2.5, dtype=dtype), zeros)

    return make


def _e2m1(n: int, k: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)


def _mxfp4(n: int, k: int) -> Source:
    exponent = _exponent(k**-0.5 / 3)
    return Source(_e2m1(n, k), torch.full((n, k // 32), exponent, dtype=torch.uint8))


def _nvfp4(n: int, k: int) -> Source:
    one = 0x38  # in e4m3
    return Source(_e2m1(n, k), torch.full((n, k // 16), one, dtype=torch.uint8), None, k**-0.5 / 3)


def _ggml(name: str, bits: float, largest: int, *halves: int) -> Method:
    """A method with random blocks. halves: positions of fp16 d and m. largest: the largest factor
    of d."""

    def make(n: int, k: int) -> Source:
        from kt_kernel.weights.formats import WeightFormat

        format = WeightFormat(name)
        count = k // format.block_columns
        blocks = torch.randint(0, 256, (n, count, format.file_bytes), dtype=torch.uint8)
        for at in halves:
            half = torch.full((n, count, 1), 2 * k**-0.5 / largest, dtype=torch.float16)
            blocks[..., at : at + 2] = half.view(torch.uint8)
        return Source(blocks.flatten(1))

    return Method(name, name, bits, make, ggml=True)


METHODS = {
    method.name: method
    for method in (
        Method("BF16", "BF16", 16, _dense),
        Method("AMXINT8", "INT8_ROW", 8, _dense),
        Method("AMXINT4", "INT4_ROW", 4, _dense),
        Method("INT4_G32", "INT4_GROUP", 4.5, _dense, group=32),
        Method("INT4_G128", "INT4_GROUP", 4.125, _dense, group=128),
        Method(
            "RAWINT4",
            "INT4_GROUP",
            4.5,
            _int4(32, torch.bfloat16, False),
            group=32,
            scale_type=BF16,
        ),
        Method("GPTQ_INT4", "INT4_ZERO", 4.25, _int4(128, torch.float16, True), group=128),
        Method("FP8", "FP8_BLOCK", 8, _fp8),
        Method("FP8_PERCHANNEL", "FP8_ROW", 8, _fp8_row),
        Method("MXFP8", "MXFP8", 8.25, _mxfp8),
        Method("MXFP4", "MXFP4", 4.25, _mxfp4),
        Method("NVFP4", "NVFP4", 4.5, _nvfp4),
        _ggml("Q4_1", 5, 15, 0, 2),
        _ggml("Q5_0", 5.5, 16, 0),
        _ggml("Q5_1", 6, 31, 0, 2),
        _ggml("Q8_0", 8.5, 127, 0),
        _ggml("Q2_K", 2.625, 15 * 3, 80, 82),
        _ggml("Q3_K", 3.5625, 32 * 4, 108),
        _ggml("Q4_K", 4.625, 63 * 15, 0, 2),
        _ggml("Q5_K", 5.625, 63 * 31, 0, 2),
        _ggml("Q6_K", 6.5625, 128 * 32, 208),
        _ggml("IQ4_NL", 4.5, 127, 0),
        _ggml("IQ4_XS", 4.3125, 32 * 127, 0),
    )
}
# The methods that are measured by default.
USUAL_METHODS = [name for name, method in METHODS.items() if not method.ggml]


def expert_sources(method: Method, shape: Shape) -> list[Source]:
    """gate, up and down of one expert, the same in every process."""
    torch.manual_seed(SEED)
    sizes = [(shape.inter, shape.hidden)] * 2 + [(shape.hidden, shape.inter)]
    return [method.make(*size) for size in sizes]


def unit_of(method: Method, table: str, ceilings: dict[str, float]) -> str:
    """The unit whose peak bounds the method's products with a kernel table.

    This is the int8 unit if weights have one scale per row, otherwise the float unit: groups and
    blocks with their own scales need float32 sums. avx512_bf16 kernels multiply the 16-bit operands
    of BF16 and 8-bit floats by dpbf16, which is faster than float32 FMA on some CPUs and slower on
    others; the faster unit is used.
    """
    integer, floating = TABLES_BY_UNIT[table]
    if method.per_row_integer:
        return integer
    if table == "avx512_bf16" and (method.format == "BF16" or method.eight_bit_float):
        return max(floating, "avx512_bf16", key=ceilings.__getitem__)
    return floating


def goal_of(method: str, table: str, tokens: int, per_expert: float) -> float | None:
    """The share of t_min that a layer must reach, or None without a goal."""
    kind = METHODS[method]
    if tokens <= 8:
        if table == "avx2":
            return 0.9 if kind.format in ("BF16", "INT8_ROW") else 0.8 if kind.bits > 5 else 0.75
        return 0.9 if kind.bits > 5 else 0.85
    if per_expert < 64:
        return None
    if table == "amx":
        return 0.65 if method in ("BF16", "AMXINT8", "AMXINT4") else 0.5
    return 0.6


def peer_goal_of(method: str, table: str, tokens: int) -> float | None:
    """How many times as fast as kt-kernel 0.7.2 a layer must be, or None without a goal. With AVX2,
    85% of t_min is enough, too."""
    if table == "avx2":
        return 2.0
    if tokens <= 8:
        return 1.25
    if tokens < 1024 or table != "amx":
        return None
    return {"BF16": 2.2, "AMXINT8": 2.5, "AMXINT4": 2.5, "FP8": 10.0, "RAWINT4": 8.0}.get(method)
