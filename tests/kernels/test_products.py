"""Every kernel table, real and emulated, against the float64 oracle over a sweep of shapes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from . import core
from .core import AUTO, BF16, FORMATS, INT4_GROUP, INT4_ROW, INT8_ROW, TILE, VARIANTS, VECTOR, Layer

ids = [f"{m}-{t}" for m, t in VARIANTS]
variants = pytest.mark.parametrize("variant", VARIANTS, ids=ids)
formats = pytest.mark.parametrize("format,group", FORMATS)

# float32 output: what is left is float32 summation, and now and then an h that falls on the other
# side of a rounding edge than the oracle's, which moves a row by one step of one h. So most rows
# must be equal up to summation, and none may be further off than such steps.
LIMIT = 5e-3
MOST_ROWS = {BF16: 1e-3, INT4_GROUP: 1e-3}
MOST_ROWS_INTEGER = 2e-5
# AMX multiplies INT4_GROUP in bf16: each weight, its scale included, is rounded once more than the
# oracle's, by up to 2^-8.
LIMIT_ROUNDED = 1e-2
MOST_ROWS_ROUNDED = 6e-3

# (E, k, H, I): one tile, no nice divisor, primes, one column, gpt-oss' width in small.
SHAPES = [
    (4, 2, 64, 96), (4, 2, 33, 45), (3, 3, 97, 61), (2, 1, 1, 1), (2, 2, 2, 130), (6, 4, 180, 90)
]  # fmt: skip


def fit(format: int, group: int, hidden: int, inter: int) -> tuple[int, int]:
    """The shape, rounded up to whole groups for the group formats."""
    if format != INT4_GROUP:
        return hidden, inter
    return -(-hidden // group) * group, -(-inter // group) * group


def kinds(variant: tuple[str, str]) -> list[int]:
    return [AUTO, VECTOR, TILE] if variant[1] == "amx" else [AUTO]


def near(variant: tuple[str, str], format: int, errors: np.ndarray) -> bool:
    limit, most = LIMIT, MOST_ROWS.get(format, MOST_ROWS_INTEGER)
    if variant[1] == "amx" and format == INT4_GROUP:
        limit, most = LIMIT_ROUNDED, MOST_ROWS_ROUNDED
    return (
        bool(np.all(errors <= limit)) and (errors <= most).mean() >= 0.75 if len(errors) else True
    )


def check(layer: Layer, tokens: int) -> None:
    batch = layer.batch(tokens)
    errors = core.row_errors(layer.forward(*batch), layer.reference(*batch))
    worst = np.sort(errors)[::-1][:8]
    assert near(layer.variant, layer.format, errors), f"T={tokens}: row errors {worst}"


@variants
@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(variant: tuple[str, str], format: int, group: int, shape: tuple[int, ...]) -> None:
    experts, top_k, hidden, inter = shape
    hidden, inter = fit(format, group, hidden, inter)
    for kind in kinds(variant):
        layer = Layer(variant, format, group, experts, top_k, hidden, inter, kind=kind)
        for tokens in (0, 1, 2, 5, 33):
            check(layer, tokens)


@variants
@formats
def test_every_token_count(variant: tuple[str, str], format: int, group: int) -> None:
    hidden, inter = fit(format, group, 66, 70)
    for kind in kinds(variant):
        layer = Layer(variant, format, group, 3, 2, hidden, inter, kind=kind)
        for tokens in [*range(34), 512]:  # 512 is two chunks of max_tokens = 256
            check(layer, tokens)


@variants
@formats
def test_biases_limits_and_masks(variant: tuple[str, str], format: int, group: int) -> None:
    hidden, inter = fit(format, group, 96, 64)
    for kind, (limit, alpha) in itertools.product(
        kinds(variant), [(0.0, 0.0), (0.5, 0.0), (0.7, 1.702)]
    ):
        layer = Layer(
            variant, format, group, 4, 3, hidden, inter, kind=kind, biases=True, limit=limit,
            alpha=alpha, cpu_slots=[True, False, True, True], threads=(1, 2),
        )  # fmt: skip
        for tokens in (1, 20):
            check(layer, tokens)


@variants
@formats
def test_same_bits_for_any_threads(variant: tuple[str, str], format: int, group: int) -> None:
    hidden, inter = fit(format, group, 100, 200)
    for kind in kinds(variant):
        outputs = []
        for threads in (1, 2, 3, 7):
            layer = Layer(
                variant, format, group, 5, 3, hidden, inter, kind=kind, threads=(threads,)
            )
            outputs.append(layer.forward(*layer.batch(37)))
        for other in outputs[1:]:
            np.testing.assert_array_equal(outputs[0], other)


@variants
@formats
def test_same_bits_for_any_batch(variant: tuple[str, str], format: int, group: int) -> None:
    hidden, inter = fit(format, group, 100, 72)
    for kind in (k for k in (VECTOR, TILE) if k in [VECTOR, *kinds(variant)]):
        layer = Layer(variant, format, group, 4, 2, hidden, inter, kind=kind, max_tokens=16)
        x, expert_ids, weights = layer.batch(40)
        whole = layer.forward(x, expert_ids, weights)
        for first, last in ((0, 1), (1, 4), (3, 20), (20, 40)):
            part = slice(first, last)
            np.testing.assert_array_equal(
                layer.forward(x[part], expert_ids[part], weights[part]), whole[part]
            )


@variants
@formats
def test_pools_agree_within_rounding(variant: tuple[str, str], format: int, group: int) -> None:
    # More pools than units of I: some pools hold nothing.
    hidden, inter = fit(format, group, 64, 80)
    batch = None
    for threads in ((1, 1), (1, 2, 1), (1,) * 7):
        layer = Layer(variant, format, group, 3, 2, hidden, inter, threads=threads)
        batch = batch or layer.batch(9)
        errors = core.row_errors(layer.forward(*batch), layer.reference(*batch))
        assert near(variant, format, errors)


@pytest.mark.parametrize("format,group", [f for f in FORMATS if f[0] in (INT8_ROW, INT4_ROW)])
def test_integer_formats_have_the_same_bits_everywhere(format: int, group: int) -> None:
    """Integer accumulators are exact and the float operations after them the same."""
    hidden, inter = fit(format, group, 130, 65)
    outputs = {}
    for variant in VARIANTS:
        table_module = core.module(variant[0])
        if table_module is None or variant[1] not in table_module.kernel_tables():
            continue
        for kind in kinds(variant):
            layer = Layer(variant, format, group, 4, 3, hidden, inter, kind=kind)
            outputs[(*variant, kind)] = layer.forward(*layer.batch(23))
    first = outputs["_C", "avx2", AUTO]
    for where, y in outputs.items():
        np.testing.assert_array_equal(y, first, err_msg=str(where))


@variants
@formats
def test_saturating_corners(variant: tuple[str, str], format: int, group: int) -> None:
    """All weights and activations at their extremes, where narrow intermediates would saturate."""
    hidden, inter = fit(format, group, 256, 128)
    rng = np.random.default_rng(3)
    for signs in ("same", "opposed", "random"):
        weights = [
            np.ones((2, inter, hidden), np.float32) / 256,
            np.ones((2, inter, hidden), np.float32) / 256,
            np.ones((2, hidden, inter), np.float32) / 256,
        ]
        if signs == "random":
            weights = [w * rng.choice([-1, 1], w.shape).astype(np.float32) for w in weights]
        for kind in kinds(variant):
            layer = Layer(variant, format, group, 2, 2, hidden, inter, kind=kind, weights=weights)
            x = np.full((6, hidden), -4 if signs == "opposed" else 4, np.float32)
            expert_ids = np.tile([0, 1], (6, 1))
            router = np.ones((6, 2), np.float32)
            errors = core.row_errors(
                layer.forward(x, expert_ids, router), layer.reference(x, expert_ids, router)
            )
            assert near(variant, format, errors)


@variants
@formats
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_stays_alone(
    variant: tuple[str, str], format: int, group: int, bad: float
) -> None:
    hidden, inter = fit(format, group, 70, 40)
    for kind in kinds(variant):
        layer = Layer(variant, format, group, 3, 2, hidden, inter, kind=kind)
        x, expert_ids, weights = layer.batch(18)
        expert_ids = np.abs(expert_ids) % 3
        clean = layer.forward(x, expert_ids, weights)
        x[5, 7] = bad
        y = layer.forward(x, expert_ids, weights)
        if np.isnan(bad) or format != BF16:
            assert np.all(np.isnan(y[5]))
        else:  # an infinity goes through the float formats as arithmetic says
            expected = layer.reference(x, expert_ids, weights)[5]
            np.testing.assert_array_equal(np.isnan(y[5]), np.isnan(expected))
        others = np.arange(18) != 5
        np.testing.assert_array_equal(y[others], clean[others])


@variants
def test_an_infinity_does_not_meet_padding(variant: tuple[str, str]) -> None:
    """I is no multiple of 32: the columns past it must not turn a finite or infinite row to NaN."""
    for inter, limit in ((40, 7.0), (40, 0.0), (64, 7.0)):
        shapes = [(2, inter, 64), (2, inter, 64), (2, 64, inter)]
        for kind in kinds(variant):
            layer = Layer(
                variant, BF16, 0, 2, 1, 64, inter, kind=kind, limit=limit,
                weights=[np.full(s, np.float32(0.25)) for s in shapes],
            )  # fmt: skip
            x = np.ones((3, 64), np.float32)
            x[1, 5] = np.inf
            batch = (x, np.zeros((3, 1)), np.ones((3, 1), np.float32))
            np.testing.assert_allclose(layer.forward(*batch), layer.reference(*batch), rtol=1e-2)


@formats
def test_zero_and_tiny_weights(format: int, group: int) -> None:
    hidden, inter = fit(format, group, 64, 64)
    shape = [(2, inter, hidden), (2, inter, hidden), (2, hidden, inter)]
    for value in (0.0, 1e-30, 1e-40):
        layer = Layer(
            ("_C", "avx2"), format, group, 2, 1, hidden, inter,
            weights=[np.full(s, np.float32(value)) for s in shape],
        )  # fmt: skip
        y = layer.forward(*layer.batch(3))
        assert np.all(np.abs(y) < 1e-20)


@pytest.mark.parametrize("format,group", [f for f in FORMATS if f[0] != BF16])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_cannot_be_quantised(format: int, group: int, bad: float) -> None:
    hidden, inter = fit(format, group, 64, 64)
    layer = Layer(("_C", "avx2"), format, group, 2, 1, hidden, inter)
    assert layer.weights is not None
    layer.weights[2][1, 3, 4] = bad
    before = layer.unpacked()
    layer.weights[0][1] *= 3  # what comes with it must not be packed either
    with pytest.raises(ValueError, match=r"expert slot 1, down row 3: a weight is NaN or infinite"):
        layer.load(1)
    for now, then in zip(layer.unpacked(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    layer.weights[2][1, 3, 4] = 1
    layer.load(1)
    check(layer, 4)


def test_a_slot_loaded_again_keeps_nothing_of_before() -> None:
    layer = Layer(("_C", "avx2"), BF16, 0, biases=True)
    with_biases, layer.bias = layer.bias, []
    layer.load(1)
    layer.bias = [b * (np.arange(4) != 1).reshape(4, 1) for b in with_biases]
    layer.bias = [b.astype(np.float32) for b in layer.bias]
    check(layer, 9)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(format=99), "unknown weight format 99"),
        (dict(format=3, group_size=48), "group size 48"),
        (dict(group_size=32), "no groups"),
        (dict(max_tokens=0), "must be positive"),
        (dict(hidden_size=70000), "size 70000; 1 to 65536"),
        (dict(cpu_slots=[True]), "one entry per expert"),
        (dict(table="sse2"), 'table "sse2" cannot run'),
    ],
)
def test_layers_that_no_kernel_serves_are_refused(wrong: dict, message: str) -> None:
    module = core.module("_C")
    assert module is not None
    good = dict(
        num_experts=2, top_k=1, hidden_size=64, intermediate_size=64, format=0, group_size=0,
        cpu_slots=[True, False], swiglu_limit=0.0, swiglu_alpha=0.0, max_tokens=8, table="avx2",
        kind=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        module.MoeLayer(core.team("_C", (1,)), **{**good, **wrong})
    layer = module.MoeLayer(core.team("_C", (1,)), **good)
    with pytest.raises(ValueError, match="slot 1 is not held"):
        layer.unpack(1, 0, 0)
    with pytest.raises(ValueError, match="needs an output"):
        layer.submit(0, 0, 1, 0, 0, 0)


def test_layers_of_different_sizes_share_a_team() -> None:
    """Jobs of both are queued together: a later layer's larger workspace must not disturb."""
    small = Layer(("_C", "avx2"), INT8_ROW, 0, 4, 2, 64, 96, max_tokens=4)
    first = small.forward(*small.batch(7))
    large = Layer(("_C", "avx2"), INT8_ROW, 0, 9, 3, 200, 300, max_tokens=64)
    for _ in range(20):
        check(large, 70)
        np.testing.assert_array_equal(small.forward(*small.batch(7)), first)


def test_pools_without_threads_hold_nothing() -> None:
    for threads in ((0, 2), (1, 0, 1)):
        check(Layer(("_C", "avx2"), INT8_ROW, 0, threads=threads), 9)


def test_group_scale_overflow_is_refused() -> None:
    layer = Layer(("_C", "avx2"), INT4_GROUP, 32, 2, 1, 64, 64)
    assert layer.weights is not None
    layer.weights[0][0, 9, 4] = 1e6
    with pytest.raises(ValueError, match=r"gate row 9: a group's scale is above the fp16 range"):
        layer.load(0)


def test_pinned_tile_kind_without_tile_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"avx2" kernels have no tile kernel'):
        Layer(("_C", "avx2"), BF16, 0, kind=TILE)


def test_stats_count_the_work() -> None:
    layer = Layer(("_C", "avx2"), BF16, 0, 4, 2)
    x, _, weights = layer.batch(3)
    layer.forward(x, np.array([[0, 1], [1, 9], [-1, 3]]), weights)
    stats = layer.layer.stats()
    assert stats["forwards"] == 1 and stats["tokens"] == 3
    assert stats["expert_calls"] == 4 and stats["experts_touched"] == 3
    assert stats["vector_calls"] == 3 and stats["tile_calls"] == 0
