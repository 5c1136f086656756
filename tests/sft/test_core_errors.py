"""What the compiled layer refuses in training, and that nothing is lost then."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernels.core import BF16, INT8_ROW, Layer, Variant

from kernels import core

from .core_oracle import NAMES, Trained, check

AVX2 = Variant("_C", "avx2")


def made(**training: Any) -> Trained:
    return Trained(Layer(AVX2, BF16, 0, 4, 2, 64, 96), 8, options=training)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(rank=0), "rank 0; accepted: 1 to 4096"),
        (dict(rank=5000), "rank 5000"),
        (dict(dropout=1.0), "dropout 1.0"),
        (dict(dropout=-0.1), "dropout -0.1"),
        (dict(scaling=float("nan")), "scaling nan"),
        (dict(max_cache_depth=0), "max_cache_depth 0"),
    ],
)
def test_settings(wrong: dict[str, Any], message: str) -> None:
    base = Layer(AVX2, BF16, 0).layer
    with pytest.raises(ValueError, match=message):
        core._C.SftLayer(base, **{"rank": 8, "scaling": 1.0, **wrong})


def test_experts_that_are_not_loaded() -> None:
    base = core._C.MoeLayer(
        core.team("_C", (1,)),
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
    with pytest.raises(ValueError, match="expert slot 0 is not loaded"):
        core._C.SftLayer(base, rank=8, scaling=1.0)


def test_experts_that_are_lost_later() -> None:
    one = Trained(Layer(AVX2, INT8_ROW, 0, 4, 2, 64, 96), 8)
    batch = one.batch(9)
    expected = one.run(batch)
    one.forward(batch)
    shapes = [core._C.packed_shape(INT8_ROW, 0, 0, *shape) for shape in one.base.shapes]
    with pytest.raises(ValueError, match="expert slot 2, gate"):
        one.base.layer.load_packed(2, *(np.full(shape, 0xFF, np.uint8) for shape in shapes))
    for call in (one.forward, one.backward):
        with pytest.raises(ValueError, match="expert slot 2 is not loaded; load all experts first"):
            call(batch)
    one.base.load(2)
    np.testing.assert_array_equal(one.backward(batch)[1], expected.grad_weights)


def test_forward_before_the_adapters() -> None:
    base = Layer(AVX2, BF16, 0, 4, 2, 64, 96)
    one = made()
    one.layer = core._C.SftLayer(base.layer, rank=8, scaling=1.0)
    with pytest.raises(RuntimeError, match="call update_lora before forward"):
        one.forward(one.batch(3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, -np.inf, 3.4e38])
def test_adapters_that_are_not_finite(name: str, bad: float) -> None:
    one = made()
    before = one.run(one.batch(9))
    adapters = [2 * a for a in one.adapters]
    adapters[NAMES.index(name)][2, 3, 1] = bad
    adapters[5][3, 0, 0] = np.nan  # the first one is named
    matrix, factor = name.split("_")
    with pytest.raises(
        ValueError, match=f"^{matrix}_lora_{factor} of expert slot 2 has a value that is NaN"
    ):
        one.layer.update_lora(*adapters)
    after = one.run(one.batch(9))
    np.testing.assert_array_equal(before.grad_in, after.grad_in)


def test_adapters_of_other_shapes() -> None:
    one = made()
    for i, name in enumerate(NAMES):
        adapters = list(one.adapters)
        adapters[i] = np.zeros((4, 7, 7), np.float32)
        with pytest.raises(ValueError, match=rf"^{name} is \[4, 7, 7\]; expected \[4, .*\]"):
            one.layer.update_lora(*adapters)


def test_more_passes_than_are_kept() -> None:
    one = made(max_cache_depth=2)
    batches = [one.batch(n, n) for n in (3, 4)]
    for batch in batches:
        one.forward(batch)
    out = np.full((5, 64), 7, np.uint16)
    extra = one.batch(5)
    with pytest.raises(RuntimeError, match="2 forward passes wait .* max_cache_depth is 2"):
        one.layer.forward(extra.x, extra.ids, extra.weights, out, save=True, seed=0)
    assert np.all(out == 7)
    for batch in reversed(batches):
        one.backward(batch)


def test_backward_without_forward() -> None:
    one = made()
    one.forward(one.batch(3), save=False)
    with pytest.raises(RuntimeError, match="no forward pass waits for backward"):
        one.backward(one.batch(3))


@pytest.mark.parametrize("bad", [0x7FC0, 0x7F80, 0xFF80])
def test_backward_of_something_else(bad: int) -> None:
    one = made()
    batch = one.batch(5)
    wanted = one.run(batch)
    one.forward(batch)
    with pytest.raises(ValueError, match="grad_out has 4 tokens; .* had 5"):
        one.backward(one.batch(4))
    wrong = replace(batch, grad_out=batch.grad_out.copy())
    wrong.grad_out[3, 17] = bad
    with pytest.raises(ValueError, match="grad_out has a NaN .* in token 3, column 17"):
        one.backward(wrong)
    assert one.layer.pending == 1
    np.testing.assert_array_equal(one.backward(batch)[1], wanted.grad_weights)


def test_arrays_of_other_shapes_and_types() -> None:
    one = made()
    batch = one.batch(5)
    out = np.empty_like(batch.x)
    good = dict(x=batch.x, ids=batch.ids, weights=batch.weights, out=out)
    for name, message in [("ids", r"expected \[5, 2\]"), ("out", r"expected \[5, 64\]")]:
        with pytest.raises(ValueError, match=f"^{name} is .*; {message}"):
            one.layer.forward(**{**good, name: good[name][:4]}, save=True, seed=0)
    for name, dtype in [("x", np.float32), ("ids", np.int32), ("weights", np.float64)]:
        with pytest.raises(TypeError):
            one.layer.forward(**{**good, name: good[name].astype(dtype)}, save=True, seed=0)
    assert one.layer.pending == 0
    one.forward(batch)
    room = np.empty_like(batch.x), np.empty(batch.ids.shape, np.float32)
    for grads in (None, one.room()[:5], [None, *one.room()[1:]]):
        with pytest.raises(ValueError, match="arrays; expected 6"):
            one.layer.backward(batch.grad_out, *room, grads)
    with pytest.raises(ValueError, match=r"^grads, up_b is \[4, 8, 64\]; expected \[4, 96, 8\]"):
        grads = one.room()
        one.layer.backward(batch.grad_out, *room, [*grads[:3], grads[2], *grads[4:]])
    assert one.layer.pending == 1
    one.backward(batch)


def test_arrays_that_overlap() -> None:
    one = made(full_weight_grad=True)
    batch = one.batch(6)
    both = np.concatenate([batch.x, batch.x])
    room = np.full((6, 64), 7, np.uint16)
    inside = both.view(np.float32)[3:4, : 2 * 6].reshape(6, 2)
    for x, weights, out, name in (
        (batch.x, batch.weights, batch.x, "x"),
        (both[:6], batch.weights, both[1:7], "x"),
        (room, inside, both[:6], "weights"),
    ):
        with pytest.raises(ValueError, match=f"^out overlaps {name} in memory; out is written to"):
            one.layer.forward(x, batch.ids, weights, out, save=True, seed=0)
    assert one.layer.pending == 0
    expected = one.run(batch)
    one.forward(batch)
    router, grads = np.empty(batch.ids.shape, np.float32), one.room()
    parts = np.empty(2 * grads[0].size, np.float32)
    first, second = (
        parts[i : i + grads[0].size].reshape(grads[0].shape) for i in (0, grads[0].size - 1)
    )
    for grad_in, grad_weights, given, message in (
        (batch.grad_out, router, grads, "grad_in overlaps grad_out"),
        (room, router, [grads[2], *grads[1:]], "grads, up_a overlaps grads, gate_a"),
        (room, router, [first, grads[1], second, *grads[3:]], "grads, up_a overlaps grads, gate_a"),
        (room, router, [*grads[:7], grads[6], grads[8]], "grads, up overlaps grads, gate"),
        (room, grads[8].reshape(-1)[:12].reshape(6, 2), grads, "grads, down overlaps grad_weights"),
    ):
        with pytest.raises(ValueError, match=f"^{message} in memory"):
            one.layer.backward(batch.grad_out, grad_in, grad_weights, given)
    assert one.layer.pending == 1
    np.testing.assert_array_equal(one.backward(batch)[1], expected.grad_weights)


def test_two_threads_at_once() -> None:
    """Whoever comes second gets an error, and the first one its result."""
    one = Trained(Layer(AVX2, BF16, 0, 4, 4, 256, 512, max_tokens=64), 8)
    batch = one.batch(2048)
    expected = one.forward(batch, save=False)
    refusals: list[str] = []

    def forward() -> None:
        try:
            np.testing.assert_array_equal(one.forward(batch, save=False), expected)
        except RuntimeError as error:
            refusals.append(str(error))

    for _ in range(50):  # a busy machine may run one after the other
        threads = [threading.Thread(target=forward) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if refusals:
            break
    assert set(refusals) == {
        "another thread is using this layer; call it from one thread at a time"
    }
    small = made()
    check(small, small.batch(5))
