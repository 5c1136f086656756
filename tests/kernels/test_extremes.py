"""Values at the edge of what the formats and the kernels' operands hold, through whole layers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from grid import grid

from . import ggml, sources
from .core import (
    INTEGER,
    ONE_OF_EACH,
    TILE,
    VARIANTS,
    VECTOR,
    Format,
    Kind,
    Layer,
    Variant,
    kernel,
)
from .oracle import check, check_batches, integers, reference
from .sources import (
    BFLOAT16,
    E4M3_CODES,
    FP8_BLOCK,
    FP8_ROW,
    INT4_GROUP,
    INT4_ZERO,
    MXFP4,
    MXFP8,
    NVFP4,
    Source,
)

PINNED = (VECTOR, TILE)

# (code of the largest weight, of the smallest), their magnitude under a power of two.
LARGEST = {
    INT4_GROUP: (15, 0, 3),
    INT4_ZERO: (15, 0, 4),
    FP8_BLOCK: (0x7E, 0xFE, 9),
    FP8_ROW: (0x7E, 0xFE, 9),
    MXFP8: (0x7E, 0xFE, 9),
    MXFP4: (7, 15, 3),
    NVFP4: (7, 15, 3),
}


# (code, scale) of ggml's formats: of a weight whose sums stay exact, and of the one that is d.
EXTREME_BLOCKS = {ggml.Q5_0: (0, 1), ggml.Q4_K: (15, 32)}
BLOCKS_OF_ONE = {ggml.Q5_0: (17, 1), ggml.Q4_K: (1, 1)}
EXTREME_BITS = {ggml.Q5_0: 4, ggml.Q4_K: 9}


def set_scales(source: Source, exponent: int) -> None:
    """All scales to a power of two."""
    if source.format in (MXFP8, MXFP4):
        source.scale[:] = 127 + exponent
    elif source.format == NVFP4:  # the largest scale there is, 7 * 64
        source.scale[:] = 0x7E
        source.global_scale = 2.0 ** (exponent - 6) / 7
    elif source.format == INT4_ZERO or source.format == INT4_GROUP:
        bf16 = source.scale_type == BFLOAT16
        source.scale[:] = (127 + exponent) << 7 if bf16 else 2.0**exponent
    else:
        source.scale[:] = 2.0**exponent


def extreme_weights(format: Format, n: int, k: int, signs: str, rng: Any) -> Any:
    """Two experts' weights of about 1/256, with codes as large as there are."""
    if format.scale_type is None:
        w = np.full((2, n, k), np.float32(1 / 256))
        return w * rng.choice([-1, 1], w.shape).astype(np.float32) if signs == "random" else w
    made: list[Any] = []
    if format.code in ggml.GGML:
        d = 2.0 ** (-8 - EXTREME_BITS[format.code])
        for _ in range(2):
            blocks = ggml.uniform(format.code, n, k, *EXTREME_BLOCKS[format.code], d)
            if signs == "random":
                minus = rng.integers(0, 2, blocks.blocks.shape[:2], np.uint16) << np.uint16(15)
                blocks.set_halves(0, blocks.halves(0) ^ minus)
            made.append(blocks)
        return made
    for _ in range(2):
        source = sources.make_scaled(format.code, n, k, format.group, format.scale_type)
        most, least, bits = LARGEST[format.code]
        negative = rng.random((n, k)) < 0.5 if signs == "random" else np.zeros((n, k), bool)
        if source.zero is not None:
            negative = np.repeat(negative[:, :: format.group], format.group, axis=1)
            source.zero[:] = np.where(negative[:, :: format.group], 16, 0)
        source.codes[:] = np.where(negative, least, most)
        set_scales(source, -8 - bits)
        source.encode()
        made.append(source)
    return made


@grid(
    variant=VARIANTS,
    format=ONE_OF_EACH,
    kind=PINNED,
    signs=["same", "random"],
    goals=[kernel],
)
def test_saturating_corners(variant: Variant, format: Format, kind: Kind, signs: str) -> None:
    """All weights and activations at their extremes, where narrow intermediates would saturate:
    253 / 64 has both digits of fixed point at theirs (test_quantised_gemv.py)."""
    hidden, inter = format.fit(256, 128)
    rng = np.random.default_rng(3)
    shapes = [(inter, hidden), (inter, hidden), (hidden, inter)]
    weights = [extreme_weights(format, *shape, signs, rng) for shape in shapes]
    ids, router = np.tile([0, 1], (6, 1)), np.ones((6, 2), np.float32)
    rows = [[v] * hidden for v in (4, -4, 253 / 64, -253 / 64)]
    rows += [[4, -4] * (hidden // 2), [253 / 64, -253 / 64] * (hidden // 2)]
    layer = Layer.of(variant, format, 2, 2, hidden, inter, kind=kind, weights=weights)
    check_batches(layer, [(np.array(rows, np.float32), ids, router)])


@grid(
    variant=VARIANTS,
    format=ONE_OF_EACH,
    kind=PINNED,
    bad=[np.nan, np.inf, -np.inf],
    goals=[kernel],
)
def test_a_bad_row_stays_alone(variant: Variant, format: Format, kind: Kind, bad: float) -> None:
    layer = Layer.of(variant, format, 3, 2, *format.fit(70, 40), kind=kind)
    x, ids, weights = layer.batch(18)
    ids = np.abs(ids) % 3
    clean = layer.forward(x, ids, weights)
    x[5, 7] = bad
    y = layer.forward(x, ids, weights)
    if np.isnan(bad) or integers(variant.table, format.code, kind):
        assert np.all(np.isnan(y[5]))
    else:  # an infinity goes through the float kernels as arithmetic says
        expected = reference(layer, x, ids, weights)[5]
        np.testing.assert_array_equal(np.isnan(y[5]), np.isnan(expected))
    others = np.arange(18) != 5
    np.testing.assert_array_equal(y[others], clean[others])


def constant_weights(format: Format, n: int, k: int) -> Any:
    """Two experts' weights, all 1/4."""
    if format.scale_type is None:
        return np.full((2, n, k), np.float32(0.25))
    if format.code in ggml.GGML:
        return [ggml.uniform(format.code, n, k, *BLOCKS_OF_ONE[format.code], 0.25)] * 2
    made = [
        sources.make_scaled(format.code, n, k, format.group, format.scale_type) for _ in range(2)
    ]
    for source in made:
        if source.zero is not None:
            source.zero[:] = 8
        is_group = format.code in (INT4_GROUP, INT4_ZERO)
        source.codes[:] = 9 if is_group else 0x38 if format.code in E4M3_CODES else 2  # 1
        set_scales(source, -2)
        if format.code == NVFP4:
            source.scale[:], source.global_scale = 0x38, 0.25
        source.encode()
    return made


@grid(
    variant=VARIANTS,
    format=ONE_OF_EACH,
    kind=PINNED,
    size=[40, 64],
    limit=[7.0, 0.0],
    where=lambda c: not integers(c.variant.table, c.format.code, c.kind),
    goals=[kernel],
)
def test_an_infinity_does_not_meet_padding(
    variant: Variant, format: Format, kind: Kind, size: int, limit: float
) -> None:
    """H and I are no multiples of 64 and 32: what lies past them must not turn a finite or
    infinite row to NaN."""
    hidden, inter = format.fit(96, size)
    shapes = [(inter, hidden), (inter, hidden), (hidden, inter)]
    layer = Layer.of(
        variant,
        format,
        2,
        1,
        hidden,
        inter,
        kind=kind,
        limit=limit,
        weights=[constant_weights(format, *shape) for shape in shapes],
    )
    x = np.ones((3, hidden), np.float32)
    x[1, 5] = np.inf
    batch = (x, np.zeros((3, 1)), np.ones((3, 1), np.float32))
    expected = reference(layer, *batch)
    assert not np.any(np.isnan(expected))
    np.testing.assert_allclose(layer.forward(*batch), expected, rtol=1e-2)


@grid(variant=VARIANTS, format=ONE_OF_EACH, kind=PINNED)
def test_zero_scales(variant: Variant, format: Format, kind: Kind) -> None:
    """Of every second row, group or block; the sign of a zero does not matter. MX scales have no
    zero, but 2^-127."""
    rng = np.random.default_rng(4)
    layer = Layer.of(variant, format, 3, 2, *format.fit(160, 96), kind=kind)
    for w, slot in itertools.product(layer.weights, range(layer.experts)):
        if format.scale_type is None:
            w[slot][rng.random(len(w[slot])) < 0.5] = 0
            continue
        if format.code in ggml.GGML:
            for which in range(len(ggml.HALVES[format.code])):
                half = w[slot].halves(which)
                zeros = rng.choice(np.array([0, 0x8000], np.uint16), half.shape)
                w[slot].set_halves(which, np.where(rng.random(half.shape) < 0.5, zeros, half))
            continue
        scale = w[slot].scale
        zero = np.array(0, scale.dtype)
        scale[rng.random(scale.shape) < 0.5] = zero
        if format.code in (INT4_GROUP, INT4_ZERO) or scale.dtype == np.float32:
            minus = 0x8000 if scale.dtype == np.uint16 else np.array(-0.0, scale.dtype)
            scale[(scale == 0) & (rng.random(scale.shape) < 0.5)] = minus
    for slot in range(layer.experts):
        layer.load(slot)
    check(layer, 20)


@grid(variant=VARIANTS, format=ONE_OF_EACH, kind=PINNED, value=[0.0, 1e-30, 1e-40])
def test_zero_and_tiny_weights(variant: Variant, format: Format, kind: Kind, value: float) -> None:
    shapes = Layer.of(variant, format, 2, 1, *format.fit(64, 64)).shapes
    weights: list[Any] = [np.full((2, *s), np.float32(value)) for s in shapes]
    if format.code in ggml.GGML:  # whose smallest d is far from the smallest float32
        weights = [[ggml.make(format.code, *s)] * 2 for s in shapes]
        for which, w in itertools.product(range(len(ggml.HALVES[format.code])), weights):
            w[0].set_halves(which, 0)
    elif format.scale_type is not None:
        weights = [
            [sources.make(format.code, *s, format.group, format.scale_type)] * 2 for s in shapes
        ]
        for source in (w[0] for w in weights):
            # The smallest scale there is, subnormal where there are such; or zero.
            source.scale.view(f"u{source.scale.itemsize}")[:] = value > 0
            source.global_scale = 2.0**-100
    layer = Layer.of(variant, format, 2, 1, *format.fit(64, 64), kind=kind, weights=weights)
    y = layer.forward(*layer.batch(9))
    assert np.all(np.abs(y) <= (1e-13 if value else 0))


@grid(variant=VARIANTS, format=[f for f in ONE_OF_EACH if f.code in INTEGER])
def test_rows_too_small_to_scale(variant: Variant, format: Format) -> None:
    """The inverse scale of int8 activations is no float32 below 127 / FLT_MAX: taken as zeros."""
    layer = Layer.of(variant, format, 2, 1)
    x = np.full((3, layer.hidden), np.float32(1e-38))
    y = layer.forward(x, np.zeros((3, 1)), np.ones((3, 1), np.float32))
    assert not np.any(y)
