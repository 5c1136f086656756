"""Random quantised weights as checkpoints have them, and their exact values.

Written from the formats' own descriptions (OCP Microscaling Formats 1.0, OFP8 1.0, IEEE 754), apart
from the C++ that packs them: what `values` says is what W is. How each source lies in memory is in
kernels/pack/pack.h, WeightSource.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_kernel.weights import formats

from . import ggml
from .ggml import GGML, GgmlSource

Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]

BF16, INT8_ROW, INT4_ROW, INT4_GROUP, INT4_ZERO, FP8_BLOCK, FP8_ROW, MXFP8, MXFP4, NVFP4 = (
    getattr(formats, name).id
    for name in (
        "BF16",
        "INT8_ROW",
        "INT4_ROW",
        "INT4_GROUP",
        "INT4_ZERO",
        "FP8_BLOCK",
        "FP8_ROW",
        "MXFP8",
        "MXFP4",
        "NVFP4",
    )
)
SCALED = (INT4_GROUP, INT4_ZERO, FP8_BLOCK, FP8_ROW, MXFP8, MXFP4, NVFP4)
E4M3_CODES = (FP8_BLOCK, FP8_ROW, MXFP8)  # formats whose codes are bytes; others have nibbles
FP16, BFLOAT16, FP32 = 0, 1, 2  # scale types of INT4_GROUP and INT4_ZERO

# (format, group size, scale type) of every format that is packed from a quantised source: codes and
# scales, or ggml's blocks.
GROUP_FORMATS = (INT4_GROUP, INT4_ZERO)
SCALED_VARIANTS = [
    *itertools.product(GROUP_FORMATS, (32, 128), (FP16, BFLOAT16, FP32)),
    *[(f, 0, FP16) for f in SCALED if f not in GROUP_FORMATS],
]
GGML_VARIANTS = [(f, 0, FP16) for f in GGML]
VARIANTS = SCALED_VARIANTS + GGML_VARIANTS
# H and I must be multiples of these.
COLUMN_UNIT = {MXFP8: 32, MXFP4: 32, NVFP4: 16} | ggml.BLOCK_COLUMNS


def column_unit(format: int, group: int) -> int:
    return group or COLUMN_UNIT.get(format, 1)


def _e4m3(code: int) -> float:
    """OFP8 1.0, E4M3: bias 7, subnormals, no infinities; S.1111.111 is NaN."""
    sign = -1.0 if code >> 7 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _e2m1(code: int) -> float:
    """OCP MX 1.0, E2M1: bias 1, one subnormal, no infinities or NaN."""
    sign = -1.0 if code >> 3 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


E4M3 = np.array([_e4m3(c) for c in range(256)])
E2M1 = np.array([_e2m1(c) for c in range(16)])
# OCP MX 1.0, E8M0: 2^(code - 127), 255 is NaN.
E8M0 = np.array([2.0 ** (c - 127) for c in range(255)] + [float("nan")])
E4M3_FINITE = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)


def bf16_values(bits: npt.NDArray[np.uint16]) -> Doubles:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def scale_values(scale: npt.NDArray[Any], scale_type: int) -> Doubles:
    return bf16_values(scale) if scale_type == BFLOAT16 else scale.astype(np.float64)


@dataclass
class Source:
    """W [n, k] with one code per element and everything else as in memory.

    `scale` has the source's own type: uint16 bits for bf16, uint8 codes for ue8m0 and e4m3.
    """

    format: int
    group: int
    scale_type: int
    codes: Bytes  # [n, k]: u, e4m3 or e2m1
    scale: npt.NDArray[Any]
    zero: Bytes | None = None  # [n, k/group]
    global_scale: float = 1.0
    data: Bytes = field(init=False)  # [n, k] or [n, k/2]

    def __post_init__(self) -> None:
        self.encode()

    def encode(self) -> None:
        """Makes `data` from `codes`. Must be called again after changing them."""
        if self.format in E4M3_CODES:
            self.data = self.codes
        else:
            self.data = self.codes[:, 0::2] | self.codes[:, 1::2] << 4

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def address(self) -> tuple[int, int, int, float]:
        """(data, scale, zero, global) for `_C`, valid while this object lives."""
        for array in (self.data, self.scale):
            assert array.flags.c_contiguous
        zero = 0 if self.zero is None else self.zero.ctypes.data
        return self.data.ctypes.data, self.scale.ctypes.data, zero, self.global_scale

    @property
    def values(self) -> Doubles:
        """W [n, k], exactly: a code times a scale has few enough bits for float64."""
        n, k = self.codes.shape
        u = self.codes.astype(np.float64)
        if self.format in GROUP_FORMATS:
            zero = 8.0 if self.zero is None else np.repeat(self.zero, self.group, axis=1)
            scale = scale_values(self.scale, self.scale_type)
            return (u - zero) * np.repeat(scale, self.group, axis=1)
        if self.format == FP8_BLOCK:
            blocks = np.repeat(np.repeat(self.scale, 128, axis=0), 128, axis=1)[:n, :k]
            return E4M3[self.codes] * blocks.astype(np.float64)
        if self.format == FP8_ROW:
            return E4M3[self.codes] * self.scale.astype(np.float64)[:, None]
        if self.format == MXFP8:
            return E4M3[self.codes] * np.repeat(E8M0[self.scale], 32, axis=1)
        if self.format == MXFP4:
            return E2M1[self.codes] * np.repeat(E8M0[self.scale], 32, axis=1)
        scale = np.repeat(E4M3[self.scale], 16, axis=1)
        return E2M1[self.codes] * scale * float(np.float32(self.global_scale))


def address_of(matrix: Any) -> tuple[int, int, int, float]:
    """The address of a Source, or of dense weights in a contiguous array that must stay alive."""
    return (matrix.ctypes.data, 0, 0, 1.0) if isinstance(matrix, np.ndarray) else matrix.address


def dtype_of(matrix: Any) -> int:
    """The core's dtype: -1 for a Source, float32's number for an array."""
    return FP32 if isinstance(matrix, np.ndarray) else -1


def scale_shape(format: int, n: int, k: int, group: int) -> tuple[int, ...]:
    if format == FP8_BLOCK:
        return -(-n // 128), -(-k // 128)
    if format == FP8_ROW:
        return (n,)
    return n, k // (group or {NVFP4: 16}.get(format, 32))


def _float_scales(
    rng: np.random.Generator, shape: tuple[int, ...], scale_type: int, edges: bool, signed: bool
) -> npt.NDArray[Any]:
    scale = 2.0 ** rng.uniform(-9, -4, shape)
    if scale_type == BFLOAT16:
        bits = (scale.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        # 0, -0, the smallest and the largest subnormal, the smallest normal, 1, the largest
        extremes = np.array([0, 0x8000, 1, 0x7F, 0x80, 0x3F80, 0x7F7F], np.uint16)
    elif scale_type == FP16:
        bits = scale.astype(np.float16)
        extremes = np.array([0, 0x8000, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF], np.uint16).view(
            np.float16
        )
    else:
        bits = scale.astype(np.float32)
        extremes = np.array(
            [0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF], np.uint32
        ).view(np.float32)
    if edges:
        _sprinkle(rng, bits, extremes)
    if signed:
        words = bits.view(f"u{bits.itemsize}")
        words ^= rng.integers(0, 2, shape, words.dtype) << (8 * bits.itemsize - 1)
    return bits


def _sprinkle(
    rng: np.random.Generator, array: npt.NDArray[Any], extremes: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Replaces half of the elements by extremes, each at least once if there is room."""
    flat = array.reshape(-1)
    chosen = rng.permutation(len(flat))[: max(len(flat) // 2, min(len(flat), len(extremes)))]
    flat[chosen] = np.resize(extremes, len(chosen))
    return array


def make(
    format: int,
    n: int,
    k: int,
    group: int = 0,
    scale_type: int = FP16,
    *,
    seed: int = 0,
    edges: bool = False,
) -> Source | GgmlSource:
    """A random source with all codes of the format. Scales are those of usual weights or, with
    `edges`, also zeros, subnormals and the largest, which make W itself huge or infinite."""
    if format in GGML:
        return ggml.make(format, n, k, seed=seed, edges=edges)
    return make_scaled(format, n, k, group, scale_type, seed=seed, edges=edges)


def make_scaled(
    format: int,
    n: int,
    k: int,
    group: int = 0,
    scale_type: int = FP16,
    *,
    seed: int = 0,
    edges: bool = False,
) -> Source:
    """A random source of a format whose codes and scales are separate."""
    rng = np.random.default_rng([seed, format, n, k, group, scale_type])
    shape = scale_shape(format, n, k, group)
    zero = None
    global_scale = 1.0
    scale: npt.NDArray[Any]
    if format in E4M3_CODES:
        codes = _sprinkle(rng, rng.choice(E4M3_FINITE, (n, k)), E4M3_FINITE)
    else:
        codes = _sprinkle(rng, rng.integers(0, 16, (n, k), np.uint8), np.arange(16, dtype=np.uint8))
    if format in GROUP_FORMATS:
        scale = _float_scales(rng, shape, scale_type, edges, signed=True)
        if format == INT4_ZERO:
            zero = rng.integers(0, 17, shape, np.uint8)
    elif format in (FP8_BLOCK, FP8_ROW):
        scale = _float_scales(rng, shape, FP32, edges, signed=False)
    elif format in (MXFP8, MXFP4):
        scale = rng.integers(118, 124, shape, np.uint8)
        if edges:
            _sprinkle(rng, scale, np.array([0, 1, 127, 253, 254], np.uint8))
    else:
        scale = rng.integers(0x28, 0x58, shape, np.uint8)
        global_scale = 2.0**-7 * 1.25
        if edges:
            _sprinkle(rng, scale, np.array([0, 1, 7, 8, 0x38, 0x7E], np.uint8))
    return Source(format, group, scale_type, codes, scale, zero, global_scale)
