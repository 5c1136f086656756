"""Every kernel table, real and emulated, format and kind of kernel against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
from grid import grid

from . import core
from .core import (
    ALL_BLOCKS,
    FORMATS,
    KINDS,
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
from .oracle import check, check_batches, check_errors, reference

# (E, k, H, I): one tile, no nice divisor, primes, one column, gpt-oss' width in small; stretches of
# columns in the kernels that hold one unit more than a multiple of four.
SHAPES = [
    (4, 2, 64, 96),
    (4, 2, 33, 45),
    (3, 3, 97, 61),
    (2, 1, 1, 1),
    (2, 2, 2, 130),
    (6, 4, 180, 90),
    (2, 2, 288, 160),
]


def has_tails(format: Format, shape: tuple[int, ...]) -> bool:
    """Whether rows or columns end within a tile; of formats whose sizes fill tiles: a pair."""
    step = 32 if format.column_unit < 32 else 64
    return any(size % step for size in format.fit(*shape[2:]))


def kernel_with_tails(case: Any) -> tuple[Variant, Format, Kind] | None:
    return kernel(case) if has_tails(case.format, case.shape) else None


@grid(variant=VARIANTS, format=FORMATS, kind=KINDS, shape=SHAPES, goals=[kernel, kernel_with_tails])
def test_shapes(variant: Variant, format: Format, kind: Kind, shape: tuple[int, ...]) -> None:
    experts, top_k, *sizes = shape
    layer = Layer.of(variant, format, experts, top_k, *format.fit(*sizes), kind=kind)
    check(layer, 0, 1, 2, 5, 33)


@grid(variant=VARIANTS, format=ONE_OF_EACH, kind=KINDS)
def test_every_token_count(variant: Variant, format: Format, kind: Kind) -> None:
    layer = Layer.of(variant, format, 3, 2, *format.fit(66, 70), kind=kind)
    x, ids, weights = layer.batch(512)  # two chunks of max_tokens = 256
    expected = reference(layer, x, ids, weights)
    errors = []
    for t in [*range(34), 256, 257, 512]:
        errors.append(core.row_errors(layer.forward(x[:t], ids[:t], weights[:t]), expected[:t]))
    check_errors(layer, np.concatenate(errors))


@grid(
    variant=VARIANTS,
    format=ONE_OF_EACH,
    kind=KINDS,
    clamp=[(0.0, 0.0), (0.5, 0.0), (0.7, 1.702)],
)
def test_biases_limits_and_masks(
    variant: Variant, format: Format, kind: Kind, clamp: tuple[float, float]
) -> None:
    """clamp: limit and alpha of the activation."""
    layer = Layer.of(
        variant,
        format,
        4,
        3,
        *format.fit(96, 64),
        kind=kind,
        biases=True,
        limit=clamp[0],
        alpha=clamp[1],
        cpu_slots=[True, False, True, True],
        threads=(1, 2),
    )
    check(layer, 1, 20)


@grid(variant=VARIANTS, format=ONE_OF_EACH, kind=KINDS, threads=[(1, 1), (1, 2, 1), (1,) * 7])
def test_pools_agree_within_rounding(
    variant: Variant, format: Format, kind: Kind, threads: tuple[int, ...]
) -> None:
    # Three units of I that no pool boundary may cross, the last one cut short where that is
    # accepted; also more pools than units, so that some hold nothing.
    hidden, inter = format.fit(64, 2 * format.pool_unit + 16)
    check(Layer.of(variant, format, 3, 2, hidden, inter, threads=threads, kind=kind), 9)


@grid(variant=VARIANTS, format=ONE_OF_EACH, kind=KINDS)
def test_expert_loads(variant: Variant, format: Format, kind: Kind) -> None:
    """All tokens to one expert, once and twice each; experts with one token or none; no token."""
    layer = Layer.of(variant, format, 4, 2, *format.fit(70, 40), kind=kind)
    x, _, weights = layer.batch(70)
    one_hot = np.full((70, 2), -1)
    one_hot[:, 1] = 2
    twice = np.full((70, 2), 3)
    lonely = np.where(np.arange(140).reshape(70, 2) == 77, 1, 0)
    check_batches(layer, [(x, ids, weights) for ids in (one_hot, twice, lonely)])
    nothing = np.tile([-1, 4], (70, 1))
    assert not np.any(layer.forward(x, nothing, weights))


@grid(variant=VARIANTS)
def test_every_table_has_both_kinds(variant: Variant) -> None:
    for format in (*FORMATS, *ALL_BLOCKS[1:]):
        for kind, name in ((VECTOR, "vector_calls"), (TILE, "tile_calls")):
            layer = Layer.of(variant, format, 2, 1, *format.fit(1, 1), kind=kind)
            x, _, weights = layer.batch(3)
            layer.forward(x, np.array([[0], [1], [1]]), weights)
            stats = layer.layer.stats()
            assert stats[name] == stats["experts_touched"] == 2, (format.name, name)


def test_stats_count_the_work() -> None:
    layer = Layer(("_C", "avx2"), core.BF16, 0, 4, 2)
    x, _, weights = layer.batch(3)
    layer.forward(x, np.array([[0, 1], [1, 9], [-1, 3]]), weights)
    stats = layer.layer.stats()
    assert stats["forwards"] == 1 and stats["tokens"] == 3
    assert stats["expert_calls"] == 4 and stats["experts_touched"] == 3
    assert stats["vector_calls"] == 3 and stats["tile_calls"] == 0
