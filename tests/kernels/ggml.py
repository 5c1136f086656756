"""Weights in ggml's formats as in GGUF files, their exact values, and their parts.

`GgmlSource.values` come from the gguf package, which is ggml's own. `parts_of` takes blocks apart
for the writer of packed bytes (layout_writer.py). It is written from the structs in ggml's
ggml-common.h, independent of the C++.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from kt_kernel.weights.formats import WeightFormat, ggml_formats

Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]

NAMES = {format.id: format.name for format in ggml_formats()}
GGML = tuple(NAMES)
Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = (
    WeightFormat(name).id
    for name in (
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
    )
)
TYPES = {f: gguf.GGMLQuantizationType[name] for f, name in NAMES.items()}
BLOCK_COLUMNS, BLOCK_BYTES = (
    {f: gguf.GGML_QUANT_SIZES[TYPES[f]][i] for f in GGML} for i in range(2)
)
CODE_BITS = {
    Q4_1: 4,
    Q5_0: 5,
    Q5_1: 5,
    Q8_0: 8,
    Q2_K: 2,
    Q3_K: 3,
    Q4_K: 4,
    Q5_K: 5,
    Q6_K: 6,
    IQ4_NL: 4,
    IQ4_XS: 4,
}
# The position of d in a block, and of m if there is one.
HALVES = {
    Q4_1: (0, 2),
    Q5_0: (0,),
    Q5_1: (0, 2),
    Q8_0: (0,),
    Q2_K: (80, 82),
    Q3_K: (108,),
    Q4_K: (0, 2),
    Q5_K: (0, 2),
    Q6_K: (208,),
    IQ4_NL: (0,),
    IQ4_XS: (0,),
}
# The exponent of d and m with which the largest weights are about 1.
EXPONENTS = {
    Q4_1: (-4, -1),
    Q5_0: (-4,),
    Q5_1: (-5, -1),
    Q8_0: (-7,),
    Q2_K: (-6, -4),
    Q3_K: (-7,),
    Q4_K: (-10, -6),
    Q5_K: (-11, -6),
    Q6_K: (-12,),
    IQ4_NL: (-7,),
    IQ4_XS: (-12,),
}
# 0, -0, the smallest and the largest subnormal, the smallest normal, 1, the largest, of both signs.
FP16_EDGES = np.array(
    [s | x for x in (0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF) for s in (0, 0x8000)], np.uint16
)


@dataclass
class GgmlSource:
    """W [n, k] as blocks, with the interface of `sources.Source`."""

    format: int
    blocks: Bytes  # [n, k / block, bytes]
    group: int = 0
    scale_type: int = 0
    global_scale: float = 1.0
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        n, blocks, size = self.blocks.shape
        assert size == BLOCK_BYTES[self.format]
        self.shape = n, blocks * BLOCK_COLUMNS[self.format]

    @property
    def address(self) -> tuple[int, int, int, float]:
        """(data, scale, zero, global) for `_C`, valid while this object lives."""
        assert self.blocks.flags.c_contiguous
        return self.blocks.ctypes.data, 0, 0, 1.0

    @property
    def values(self) -> Doubles:
        """W [n, k] as float32: exact, or rounded once if there is a minimum."""
        rows = self.blocks.reshape(len(self.blocks), -1)
        with np.errstate(over="ignore"):
            w = gguf.quants.dequantize(rows, TYPES[self.format])
        return w.astype(np.float64)

    def halves(self, which: int) -> npt.NDArray[np.uint16]:
        """d (0) or m (1) of all blocks [n, k / block], as bits."""
        at = HALVES[self.format][which]
        return self.blocks[..., at].astype(np.uint16) | self.blocks[..., at + 1].astype(
            np.uint16
        ) << np.uint16(8)

    def set_halves(self, which: int, bits: Any) -> None:
        at = HALVES[self.format][which]
        bits = np.broadcast_to(np.asarray(bits, np.uint16), self.blocks.shape[:2])
        self.blocks[..., at] = bits & 255
        self.blocks[..., at + 1] = bits >> 8


def make(format: int, n: int, k: int, *, seed: int = 0, edges: bool = False) -> GgmlSource:
    """Random blocks with all possible codes and scales. d and m are those of usual weights, with
    both signs, or, with `edges`, half of them are edge cases of fp16."""
    rng = np.random.default_rng([seed, format, n, k])
    shape = (n, k // BLOCK_COLUMNS[format])
    source = GgmlSource(format, rng.integers(0, 256, (*shape, BLOCK_BYTES[format]), np.uint8))
    for which, exponent in enumerate(EXPONENTS[format]):
        size = 2.0 ** rng.uniform(exponent - 5, exponent - 3, shape) * rng.choice([-1, 1], shape)
        bits = size.astype(np.float16).view(np.uint16)
        if edges:
            bits = np.where(rng.random(shape) < 0.5, rng.choice(FP16_EDGES, shape), bits)
        source.set_halves(which, bits)
    return source


def uniform(format: int, n: int, k: int, code: int, scale: int, d: float) -> GgmlSource:
    """All codes, scales and d are equal; m is 0. Only for the formats of layer tests."""
    block = {
        Q5_0: [0, 0, *[255 * (code >> 4)] * 4, *[(code & 15) * 17] * 16],
        Q4_K: [
            *[0] * 4,
            *[scale | scale >> 4 << 6] * 4,
            *[0] * 4,
            *[scale & 15] * 4,
            *[code * 17] * 128,
        ],
    }[format]
    blocks = np.tile(np.array(block, np.uint8), (n, k // BLOCK_COLUMNS[format], 1))
    source = GgmlSource(format, blocks)
    source.set_halves(0, np.float16(d).view(np.uint16))
    return source


class Parts(NamedTuple):
    """The content of a packed block for each row of a matrix, by block [n, k / block, ...]."""

    halves: list[npt.NDArray[np.uint16]]  # d, and m if there is one
    scales: Bytes  # [..., sub-blocks, bytes each]
    codes: Bytes  # [..., columns]


def bits(x: Bytes, at: int, count: int) -> Bytes:
    return x >> np.uint8(at) & np.uint8((1 << count) - 1)


def nibbles(x: Bytes, half: int) -> Bytes:
    """The low nibbles of `half` bytes, then their high nibbles, and so on."""
    x = x.reshape(*x.shape[:-1], -1, half)
    both = np.stack([bits(x, 0, 4), bits(x, 4, 4)], -2)
    return both.reshape(*x.shape[:-2], -1)


def turns(x: Bytes, count: int, of: int = 32) -> Bytes:
    """`count` bits at a time of `of` bytes: the lowest bits of all bytes, then the next, and so
    on."""
    x = x.reshape(*x.shape[:-1], -1, of)
    parts = np.stack([bits(x, at, count) for at in range(0, 8, count)], -2)
    return parts.reshape(*x.shape[:-2], -1)


def scales_of(format: int, b: Bytes) -> Bytes:
    signed = np.uint8(32)
    if format == Q2_K:
        return b[..., :16, None]
    if format == Q6_K:
        return b[..., 192:208, None]
    if format == Q3_K:
        return (nibbles(b[..., 96:104], 8) | turns(b[..., 104:108], 2, 4) << 4)[..., None] - signed
    if format == IQ4_XS:
        low = np.stack([bits(b[..., 4:8], 0, 4), bits(b[..., 4:8], 4, 4)], -1)
        high = np.stack([bits(b[..., 2:4], at, 2) for at in (0, 2, 4, 6)], -1)
        flat = low.reshape(*b.shape[:-1], 8) | high.reshape(*b.shape[:-1], 8) << 4
        return flat[..., None] - signed
    if format in (Q4_K, Q5_K):
        first, second, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
        scale = [bits(first, 0, 6), bits(rest, 0, 4) | bits(first, 6, 2) << 4]
        minimum = [bits(second, 0, 6), bits(rest, 4, 4) | bits(second, 6, 2) << 4]
        return np.stack([np.concatenate(scale, -1), np.concatenate(minimum, -1)], -1)
    return b[..., :0, None]


def codes_of(format: int, b: Bytes) -> Bytes:
    if format == Q8_0:
        return b[..., 2:]
    if format in (Q4_1, IQ4_NL):
        return nibbles(b[..., -16:], 16)
    if format in (Q5_0, Q5_1):
        high = np.unpackbits(b[..., -20:-16], axis=-1, bitorder="little")
        return nibbles(b[..., -16:], 16) | high << 4
    if format == Q2_K:
        return turns(b[..., 16:80], 2)
    if format == Q3_K:
        return turns(b[..., 32:96], 2) | turns(b[..., :32], 1) << 2
    if format == Q4_K:
        return nibbles(b[..., 16:], 32)
    if format == Q5_K:
        return nibbles(b[..., 48:], 32) | turns(b[..., 16:48], 1) << 4
    if format == Q6_K:
        return nibbles(b[..., :128], 64) | turns(b[..., 128:192], 2) << 4
    return nibbles(b[..., 8:], 16)  # IQ4_XS


def parts_of(source: GgmlSource) -> Parts:
    halves = [source.halves(i) for i in range(len(HALVES[source.format]))]
    b = source.blocks
    return Parts(halves, scales_of(source.format, b), codes_of(source.format, b))
