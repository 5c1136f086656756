"""Every kernel table, real and emulated, format and kind of kernel against the float64 oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from . import core
from .core import (
    ALL_BLOCKS,
    FORMATS,
    KINDS,
    ONE_OF_EACH,
    TILE,
    VECTOR,
    Format,
    Layer,
    formats,
    variants,
)
from .oracle import check, check_batches, check_errors, reference

Variant = tuple[str, str]

# (E, k, H, I): one tile, no nice divisor, primes, one column, gpt-oss' width in small; stretches of
# columns in the kernels that hold one unit more than a multiple of four.
SHAPES = [
    (4, 2, 64, 96), (4, 2, 33, 45), (3, 3, 97, 61), (2, 1, 1, 1), (2, 2, 2, 130), (6, 4, 180, 90),
    (2, 2, 288, 160),
]  # fmt: skip


@variants
@formats(FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(variant: Variant, format: Format, shape: tuple[int, ...]) -> None:
    experts, top_k, *sizes = shape
    for kind in KINDS:
        layer = Layer.of(variant, format, experts, top_k, *format.fit(*sizes), kind=kind)
        check(layer, 0, 1, 2, 5, 33)


@variants
@formats(ONE_OF_EACH)
def test_every_token_count(variant: Variant, format: Format) -> None:
    for kind in KINDS:
        layer = Layer.of(variant, format, 3, 2, *format.fit(66, 70), kind=kind)
        x, ids, weights = layer.batch(512)  # two chunks of max_tokens = 256
        expected = reference(layer, x, ids, weights)
        errors = []
        for t in [*range(34), 256, 257, 512]:
            errors.append(core.row_errors(layer.forward(x[:t], ids[:t], weights[:t]), expected[:t]))
        check_errors(layer, np.concatenate(errors))


@variants
@formats(ONE_OF_EACH)
def test_biases_limits_and_masks(variant: Variant, format: Format) -> None:
    for kind, (limit, alpha) in itertools.product(KINDS, [(0.0, 0.0), (0.5, 0.0), (0.7, 1.702)]):
        layer = Layer.of(
            variant, format, 4, 3, *format.fit(96, 64), kind=kind, biases=True, limit=limit,
            alpha=alpha, cpu_slots=[True, False, True, True], threads=(1, 2),
        )  # fmt: skip
        check(layer, 1, 20)


@variants
@formats(ONE_OF_EACH)
def test_pools_agree_within_rounding(variant: Variant, format: Format) -> None:
    # Three units of I that no pool boundary may cross, the last one cut short where that is
    # accepted; also more pools than units, so that some hold nothing.
    hidden, inter = format.fit(64, 2 * format.pool_unit + 16)
    for kind, threads in itertools.product(KINDS, ((1, 1), (1, 2, 1), (1,) * 7)):
        check(Layer.of(variant, format, 3, 2, hidden, inter, threads=threads, kind=kind), 9)


@variants
@formats(ONE_OF_EACH)
def test_expert_loads(variant: Variant, format: Format) -> None:
    """All tokens to one expert, once and twice each; experts with one token or none; no token."""
    for kind in KINDS:
        layer = Layer.of(variant, format, 4, 2, *format.fit(70, 40), kind=kind)
        x, _, weights = layer.batch(70)
        one_hot = np.full((70, 2), -1)
        one_hot[:, 1] = 2
        twice = np.full((70, 2), 3)
        lonely = np.where(np.arange(140).reshape(70, 2) == 77, 1, 0)
        check_batches(layer, [(x, ids, weights) for ids in (one_hot, twice, lonely)])
        nothing = np.tile([-1, 4], (70, 1))
        assert not np.any(layer.forward(x, nothing, weights))


@variants
@formats([*FORMATS, *ALL_BLOCKS[1:]])
def test_every_table_has_both_kinds(variant: Variant, format: Format) -> None:
    for kind, name in ((VECTOR, "vector_calls"), (TILE, "tile_calls")):
        layer = Layer.of(variant, format, 2, 1, *format.fit(1, 1), kind=kind)
        x, _, weights = layer.batch(3)
        layer.forward(x, np.array([[0], [1], [1]]), weights)
        stats = layer.layer.stats()
        assert stats[name] == stats["experts_touched"] == 2


def test_stats_count_the_work() -> None:
    layer = Layer(("_C", "avx2"), core.BF16, 0, 4, 2)
    x, _, weights = layer.batch(3)
    layer.forward(x, np.array([[0, 1], [1, 9], [-1, 3]]), weights)
    stats = layer.layer.stats()
    assert stats["forwards"] == 1 and stats["tokens"] == 3
    assert stats["expert_calls"] == 4 and stats["experts_touched"] == 3
    assert stats["vector_calls"] == 3 and stats["tile_calls"] == 0
