"""Layers: what they accept, loading a slot again, and sharing a team."""

from __future__ import annotations

import numpy as np
import pytest

from . import core
from .core import BF16, DENSE, INT4_GROUP, INT8_ROW, Format, Layer, formats
from .oracle import check


@formats([f for f in DENSE if f.code != BF16])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_cannot_be_quantised(format: Format, bad: float) -> None:
    layer = Layer.of(("_C", "avx2"), format, 2, 1, *format.fit(64, 64))
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


def test_group_scale_overflow_is_refused() -> None:
    layer = Layer(("_C", "avx2"), INT4_GROUP, 32, 2, 1, 64, 64)
    layer.weights[0][0, 9, 4] = 1e6
    with pytest.raises(ValueError, match=r"gate row 9: a group's scale is above the fp16 range"):
        layer.load(0)


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
        (dict(forms=[(0, 0, 0), (99, 0, 0), (0, 0, 0)]), "up: unknown weight format 99"),
        (dict(forms=[(3, 48, 0)] * 3), "gate: group size 48"),
        (
            dict(forms=[(0, 0, 0), (0, 0, 0), (0, 32, 0)]),
            "down: group size 32; this weight format has no g",
        ),
        (dict(forms=[(3, 64, 7)] * 3), "gate: unknown scale type 7"),
        (dict(forms=[(0, 0, 0), (8, 0, 0), (0, 0, 0)], hidden_size=72), "up: 72 columns; .* of 32"),
        (dict(forms=[(8, 0, 0)] * 3, intermediate_size=72), "down: 72 columns; .* of 32"),
        (dict(max_tokens=0), "max_tokens 0; accepted: 1 to"),
        (dict(hidden_size=70000), "size 70000; accepted: 1 to 65536"),
        (dict(cpu_slots=[True]), "one entry per expert"),
        (dict(table="sse2"), 'table "sse2" cannot run'),
    ],
)
def test_layers_that_no_kernel_serves_are_refused(wrong: dict, message: str) -> None:
    module = core.module("_C")
    assert module is not None
    good = dict(
        num_experts=2,
        top_k=1,
        hidden_size=64,
        intermediate_size=64,
        forms=[(0, 0, 0)] * 3,
        cpu_slots=[True, False],
        swiglu_limit=0.0,
        swiglu_alpha=0.0,
        max_tokens=8,
        table="avx2",
        kind=0,
    )
    with pytest.raises(ValueError, match=message):
        module.MoeLayer(core.team("_C", (1,)), **{**good, **wrong})
    layer = module.MoeLayer(core.team("_C", (1,)), **good)
    with pytest.raises(ValueError, match="slot 1 is not held"):
        layer.unpack(1, 0, np.empty((64, 64), np.float32))
    with pytest.raises(ValueError, match="needs an output"):
        layer.submit(0, 0, 1, 0, 0, 0)


SCATTERED = [False, True, True, False, False, True]


@pytest.mark.parametrize("threads", [(1,), (3,), (1, 2)])
@pytest.mark.parametrize("tokens", [3, 90])  # with a plan per thread, and with one for all
def test_slots_change_between_passes(tokens: int, threads: tuple[int, ...]) -> None:
    """Bit for bit as in a layer that was made so; passes queued before are not affected."""
    sizes = ("_C", "avx2"), INT8_ROW, 0, 6, 3
    layer = Layer(*sizes, threads=threads)
    fresh = Layer(*sizes, threads=threads, cpu_slots=SCATTERED)
    x, ids, weights = layer.batch(tokens)
    whole, part = layer.forward(x, ids, weights), fresh.forward(x, ids, weights)
    assert not np.array_equal(whole, part)
    for _ in range(3):
        queued = [np.zeros_like(x) for _ in range(20)]
        for y in queued:
            layer.layer.submit(
                x.ctypes.data, 2, tokens, ids.ctypes.data, weights.ctypes.data, y.ctypes.data
            )
        layer.layer.set_cpu_slots(SCATTERED)
        np.testing.assert_array_equal(queued, [whole] * 20)
        np.testing.assert_array_equal(layer.forward(x, ids, weights), part)
        layer.layer.set_cpu_slots([False] * 6)
        assert not layer.forward(x, ids, weights).any()
        layer.layer.set_cpu_slots([True] * 6)
        np.testing.assert_array_equal(layer.forward(x, ids, weights), whole)


def test_slots_that_are_not_loaded_stay_off() -> None:
    layer = Layer(("_C", "avx2"), INT8_ROW, 0, 6, 3, cpu_slots=SCATTERED)
    batch = layer.batch(9)
    before = layer.forward(*batch)
    for wrong, message in (
        ([True, *SCATTERED[1:]], "expert slot 0 is not loaded on the CPU, so the CPU cannot"),
        (SCATTERED[1:], "on_cpu needs one entry per expert: it has 5, num_experts is 6"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.layer.set_cpu_slots(wrong)
        np.testing.assert_array_equal(layer.forward(*batch), before)


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


def experts_of(layer: Layer, slots: list[int]) -> list[tuple]:
    """The layer's weights as load_many takes them."""
    return [
        (
            slot,
            [core.sources.address_of(w[slot]) for w in layer.weights],
            [2] * 3,
            [b[slot].ctypes.data for b in layer.bias] or [0] * 3,
            [0, 0],
        )
        for slot in slots
    ]


@formats(DENSE)
@pytest.mark.parametrize("threads", [(1,), (3,), (1, 2)])
def test_experts_in_one_go(format: Format, threads: tuple[int, ...]) -> None:
    layer = Layer.of(
        ("_C", "avx2"), format, 6, 2, *format.fit(96, 200), biases=True, threads=threads
    )
    before = layer.unpacked()
    layer.weights = [np.ascontiguousarray(w[::-1], np.float32) for w in layer.weights]
    layer.bias = [np.ascontiguousarray(b[::-1]) for b in layer.bias]
    layer.layer.load_many(experts_of(layer, [5, 0, 3, 1, 2, 4]))
    for now, then in zip(layer.unpacked(), before, strict=True):
        np.testing.assert_array_equal(now, then[::-1])
    check(layer, 9)


@pytest.mark.parametrize("threads", [(1,), (4,), (1, 2)])
def test_a_bad_expert_among_others(threads: tuple[int, ...]) -> None:
    """The first error is reported whatever the threads; slots loaded before stay as they were, also
    where another slot of the same call was not."""
    layer = Layer(("_C", "avx2"), INT8_ROW, 0, 5, 2, 96, 200, threads=threads)
    before = layer.unpacked()
    good = [np.ascontiguousarray(w, np.float32) for w in layer.weights]
    layer.weights = [w * 3 for w in good]
    layer.weights[1][2, 40, 7] = np.inf
    layer.weights[0][2, 150, 7] = np.nan
    layer.weights[2][4, 0, 0] = np.nan
    for _ in range(5):
        with pytest.raises(ValueError, match="^expert slot 2, up row 40: a weight is NaN"):
            layer.layer.load_many(experts_of(layer, [1, 2, 3, 4]))
        for now, then in zip(layer.unpacked(), before, strict=True):
            np.testing.assert_array_equal(now, then)


def test_a_bad_expert_on_its_first_load() -> None:
    """It may be loaded again; so may one that came with it."""
    layer = Layer(("_C", "avx2"), INT4_GROUP, 32, 3, 2, 96, 192)
    wanted = layer.unpacked()
    layer.weights = [np.ascontiguousarray(w, np.float32) for w in layer.weights]
    layer.layer = core.core_with("_C", "avx2").MoeLayer(
        core.team("_C", (2,)),
        num_experts=3,
        top_k=2,
        hidden_size=96,
        intermediate_size=192,
        forms=[(INT4_GROUP, 32, 0)] * 3,
        cpu_slots=[True] * 3,
        swiglu_limit=0.0,
        swiglu_alpha=0.0,
        max_tokens=4,
        table="avx2",
        kind=0,
    )
    good = layer.weights[2][1, 5, 5]
    layer.weights[2][1, 5, 5] = np.nan
    with pytest.raises(ValueError, match="^expert slot 1, down row 5: a weight is NaN"):
        layer.layer.load_many(experts_of(layer, [0, 1, 2]))
    layer.weights[2][1, 5, 5] = good
    layer.layer.load_many(experts_of(layer, [2, 1, 0]))
    for now, then in zip(layer.unpacked(), wanted, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_slot_named_twice() -> None:
    layer = Layer(("_C", "avx2"), BF16, 0)
    layer.weights = [np.ascontiguousarray(w, np.float32) for w in layer.weights]
    with pytest.raises(ValueError, match="expert slot 1 is named twice"):
        layer.layer.load_many(experts_of(layer, [1, 2, 1]))
    layer.layer.load_many([])
