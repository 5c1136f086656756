"""Training of the compiled layer: gradients against float64, and bits that depend on no thread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from grid import grid
from kernels.core import (
    BF16,
    INT4_GROUP,
    KINDS,
    ONE_OF_EACH,
    TILE,
    VARIANTS,
    Format,
    Kind,
    Layer,
    Variant,
)
from kernels.sources import FP16
from kernels.test_order import OrderedLayer

from .core_oracle import Batch, Gradients, Trained, bits_of, check, mask_of, philox, values_of

AVX2 = Variant("_C", "avx2")


class Setting(NamedTuple):
    name: str
    layer: dict[str, Any]
    training: dict[str, Any]

    def __hash__(self) -> int:
        return hash(self.name)


SETTINGS = [
    Setting("plain", {}, {}),
    Setting("biases", {"biases": True, "limit": 0.8}, {}),
    Setting("alpha", {"biases": True, "limit": 1.5, "alpha": 1.702}, {"recompute": True}),
    Setting("dropout", {}, {"dropout": 0.3}),
    Setting("recompute", {}, {"recompute": True, "dropout": 0.1}),
    Setting("skip", {"biases": True}, {"skip_lora_grads": True}),
    Setting("full", {}, {"full_weight_grad": True}),
    Setting(
        "full-skip", {}, {"full_weight_grad": True, "skip_lora_grads": True, "recompute": True}
    ),
    Setting("masked", {"cpu_slots": [True, False, True, True, False]}, {"full_weight_grad": True}),
]
# experts is 5; top_k, hidden, inter, rank, tokens, tokens of a chunk
SHAPES = [
    (2, 64, 96, 8, 9, 256),
    (3, 90, 200, 5, 33, 7),
    (2, 33, 45, 40, 3, 256),
    (5, 160, 70, 32, 12, 5),
]
MIN_ROWS = 3  # pairs of an expert from which Kind.AUTO takes tiles
THREADS = [(1,), (3,), (1, 2)]


def one_team(case: Any) -> bool:
    """Bits do not depend on threads, so each of the other cases runs with one team."""
    number = SHAPES.index(case.shape) + SETTINGS.index(case.setting) + KINDS.index(case.kind)
    return THREADS.index(case.threads) == number % len(THREADS)


def trained(variant: Variant, format: Format, shape: tuple[int, ...], **options: Any) -> Trained:
    top_k, hidden, inter, rank, _, chunk = shape
    training = options.pop("training", {})
    layer = Layer.of(
        variant,
        format,
        5,
        top_k,
        *format.fit(hidden, inter),
        max_tokens=chunk,
        gemm_min_rows=[MIN_ROWS] * 3,
        **options,
    )
    return Trained(layer, rank, options=training)


@grid(
    variant=VARIANTS,
    format=ONE_OF_EACH,
    setting=SETTINGS,
    shape=SHAPES,
    kind=KINDS,
    threads=THREADS,
    where=one_team,
)
def test_gradients(
    variant: Variant,
    format: Format,
    setting: Setting,
    shape: tuple[int, ...],
    kind: Kind,
    threads: tuple[int, ...],
) -> None:
    made = trained(
        variant,
        format,
        shape,
        kind=kind,
        threads=threads,
        training=setting.training,
        **setting.layer,
    )
    check(made, made.batch(shape[4]))


@grid(variant=[v for v in VARIANTS if v.table in ("avx2", "amx")], dropout=[0.0, 0.2])
def test_more_rows_and_ranks_than_a_kernel_call(variant: Variant, dropout: float) -> None:
    training = {"dropout": dropout}
    made = trained(variant, Format(BF16), (2, 96, 40, 70, 0, 300), threads=(3,), training=training)
    batch = made.batch(280)
    ids = batch.ids.copy()
    ids[:, 0] = 0
    check(made, replace(batch, ids=ids))


@grid(variant=[v for v in VARIANTS if v.table in ("avx2", "amx")], dropout=[0.0, 0.2])
def test_rows_around_the_size_of_a_block(variant: Variant, dropout: float) -> None:
    """Tiles compute 16 or 32 rows at a time."""
    training = {"dropout": dropout}
    made = trained(variant, Format(BF16), (2, 96, 72, 6, 0, 64), kind=TILE, training=training)
    for tokens in (1, 15, 16, 17, 31, 32, 33, 49):
        batch = made.batch(tokens, seed=tokens)
        ids = batch.ids.copy()
        ids[:, 0] = 0
        check(made, replace(batch, ids=ids))


def same(a: Gradients, b: Gradients) -> None:
    for x, y in zip(
        (a.out, a.grad_in, a.grad_weights, *a.grads),
        (b.out, b.grad_in, b.grad_weights, *b.grads),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


FEW_FORMATS = [f for f in ONE_OF_EACH if f.code in (BF16, INT4_GROUP)] + [Format(1)]


@grid(variant=VARIANTS, format=FEW_FORMATS, pools=[1, 2])
def test_bits_do_not_depend_on_threads(variant: Variant, format: Format, pools: int) -> None:
    options = {"training": {"dropout": 0.2, "full_weight_grad": True}, "biases": True}
    results = []
    for threads in (1, 3):
        made = trained(variant, format, SHAPES[1], threads=(threads,) * pools, **options)
        results.append(made.run(made.batch(33)))
    same(*results)


@grid(variant=VARIANTS, format=FEW_FORMATS, kind=KINDS)
def test_adapters_of_zeros_change_nothing(variant: Variant, format: Format, kind: Kind) -> None:
    """The results are then those of the inference pass, bit for bit."""
    made = trained(variant, format, SHAPES[1], kind=kind, biases=True, threads=(1, 2))
    same_as_inference(made, made.batch(33))


@grid(variant=[v for v in VARIANTS if v.table in ("avx2", "amx")])
def test_nor_do_they_where_an_expert_is_several_work_items(variant: Variant) -> None:
    made = trained(variant, Format(BF16), (3, 72, 40, 4, 0, 600), kind=TILE, threads=(2, 1))
    batch = made.batch(600)
    ids = batch.ids.copy()
    ids[:, 1] = 3
    same_as_inference(made, replace(batch, ids=ids))


def same_as_inference(made: Trained, batch: Batch) -> None:
    zeros = [a * (n % 2 == 0) for n, a in enumerate(made.adapters)]
    made.layer.update_lora(*zeros)
    expected = made.base.forward(values_of(batch.x), batch.ids, batch.weights)
    np.testing.assert_array_equal(made.forward(batch, save=False), bits_of(expected))


@grid(variant=VARIANTS, format=FEW_FORMATS, chunk=[256, 7])
def test_what_is_computed_again_has_the_same_bits(
    variant: Variant, format: Format, chunk: int
) -> None:
    shape = (*SHAPES[1][:5], chunk)
    results = []
    for recompute in (False, True):
        options = {"dropout": 0.1, "recompute": recompute}
        made = trained(variant, format, shape, biases=True, training=options, threads=(1, 1))
        results.append(made.run(made.batch(33)))
    same(*results)


@grid(
    variant=VARIANTS,
    format=[Format(INT4_GROUP, 32, FP16)],
    setting=[s for s in SETTINGS if s.name in ("plain", "dropout", "full", "recompute")],
    threads=[(2,), (1, 2)],
)
def test_columns_in_another_order(
    variant: Variant, format: Format, setting: Setting, threads: tuple[int, ...]
) -> None:
    sizes = 5, 2, *format.fit(90, 130)
    layer = OrderedLayer.of(variant, format, *sizes, threads=threads, gemm_min_rows=[MIN_ROWS] * 3)
    made = Trained(layer, 6, options=setting.training)
    check(made, made.batch(25))


def test_experts_loaded_again_with_orders() -> None:
    layer = OrderedLayer.of(AVX2, Format(INT4_GROUP, 32, FP16), 4, 2, 96, 64)
    orders, layer.orders = layer.orders, [(None, None)] * 4
    for slot in range(4):
        layer.load(slot)
    made = Trained(layer)
    check(made, made.batch(9))
    layer.orders = orders
    for slot in range(4):
        layer.load(slot)
    check(made, made.batch(9, seed=2))


def test_passes_wait_for_backward_newest_first() -> None:
    made = trained(AVX2, Format(BF16), SHAPES[0], training={"max_cache_depth": 3, "dropout": 0.2})
    batches = [made.batch(tokens, seed=tokens) for tokens in (3, 9, 5)]
    outs = [made.forward(b) for b in batches]
    assert (made.layer.pending, made.layer.pending_tokens) == (3, 5)
    made.forward(made.batch(4), save=False)
    for batch, out in reversed(list(zip(batches, outs, strict=True))):
        assert made.layer.pending_tokens == len(batch.x)
        grad_in, grad_weights, grads = made.backward(batch)
        check(made, batch, Gradients(values_of(out), values_of(grad_in), grad_weights, grads))
    assert (made.layer.pending, made.layer.pending_tokens) == (0, 0)
    check(made, made.batch(9))  # in memory that was used before


def test_dropping_and_clearing() -> None:
    made = trained(AVX2, Format(BF16), SHAPES[0], training={"max_cache_depth": 2})
    first, second = made.batch(4, 1), made.batch(6, 2)
    made.forward(first)
    made.forward(second)
    made.layer.drop_newest()
    assert made.layer.pending_tokens == 4
    made.backward(first)
    made.forward(second)
    made.layer.clear()
    assert made.layer.pending == 0
    with pytest.raises(RuntimeError, match="no forward pass waits for backward"):
        made.layer.drop_newest()


@pytest.mark.parametrize("recompute", [False, True])
def test_slots_that_change_between_forward_and_backward(recompute: bool) -> None:
    """Backward is that of the slots which the forward pass computed."""
    options = {"recompute": recompute, "full_weight_grad": True}
    made = trained(AVX2, Format(BF16), SHAPES[0], training=options)
    batch, few, all_slots = made.batch(9), [True, False, True, True, False], [True] * 5
    for first, second in ((few, all_slots), (all_slots, few)):
        made.base.layer.set_cpu_slots(first)
        expected = made.run(batch)
        out = made.forward(batch)
        made.base.layer.set_cpu_slots(second)
        grad_in, grad_weights, grads = made.backward(batch)
        same(expected, Gradients(values_of(out), values_of(grad_in), grad_weights, grads))


def test_layers_share_the_memory_of_passes() -> None:
    one, other = (trained(AVX2, Format(BF16), SHAPES[0], seed=seed) for seed in (1, 2))
    free = one.layer.free_spare
    free()
    one.run(one.batch(9))
    each = free()
    assert each > 0 and free() == 0
    for layer in (one, other, one):
        layer.run(layer.batch(9))
    assert free() == each
    for layer in (one, other):
        layer.forward(layer.batch(9))
    for layer in (one, other):
        layer.backward(layer.batch(9))
    assert free() == 2 * each
    # What is too small is replaced, and what is large enough is taken.
    for tokens in (9, 40, 9):
        one.run(one.batch(tokens))
    large = free()
    one.run(one.batch(40))
    assert free() == large > each
    one.forward(one.batch(9))
    other.layer.clear()
    check(other, other.batch(9))
    assert one.layer.pending == 1


def test_a_pass_keeps_its_memory() -> None:
    """Whatever kind of object was passed, and is dropped at once."""
    made = trained(AVX2, Format(BF16), SHAPES[3])
    large, batch = made.batch(3000), made.batch(500)
    expected = made.forward(batch, save=False)
    out, scratch = np.empty_like(batch.x), np.empty_like(large.x)
    for convert in (np.copy, torch.tensor, lambda a: torch.tensor(a).__dlpack__()):
        given = [convert(a) for a in (batch.x, batch.ids, batch.weights)]
        ahead = made.layer.submit_forward(
            large.x, large.ids, large.weights, scratch, save=False, seed=0
        )
        ticket = made.layer.submit_forward(*given, out, save=False, seed=0)
        del given
        junk = [np.full_like(a, 1) for a in (batch.x, batch.ids, batch.weights)]
        ticket.wait()
        ahead.wait()
        np.testing.assert_array_equal(out, expected)
        del junk


def test_no_tokens() -> None:
    made = trained(AVX2, Format(BF16), SHAPES[0])
    got = made.run(made.batch(0))
    assert all(not np.any(g) for g in got.grads)


def test_no_expert_here() -> None:
    made = trained(AVX2, Format(BF16), SHAPES[0], cpu_slots=[False] * 5)
    got = made.run(made.batch(5))
    assert not any(np.any(a) for a in (got.out, got.grad_in, got.grad_weights, *got.grads))


def test_adapters_are_read_when_they_are_updated() -> None:
    made = trained(AVX2, Format(BF16), SHAPES[0])
    batch = made.batch(9)
    before = made.run(batch)
    made.adapters = [values_of(bits_of(a * 2)).reshape(a.shape) for a in made.adapters]
    same(before, made.run(batch))
    made.layer.update_lora(*made.adapters)
    check(made, batch)


def test_a_queued_pass() -> None:
    made = trained(AVX2, Format(BF16), SHAPES[0], training={"dropout": 0.2})
    batch = made.batch(9)
    expected = made.run(batch)
    out = np.full(batch.x.shape, 7, np.uint16)
    ticket = made.layer.submit_forward(
        batch.x, batch.ids, batch.weights, out, save=True, seed=batch.seed
    )
    tickets = [ticket]
    ticket.wait()
    assert ticket.done
    grad_in, grad_weights, grads = made.backward(batch)
    same(expected, Gradients(values_of(out), values_of(grad_in), grad_weights, grads))
    # Dropped before it is done: its memory is not the next one's.
    other = made.batch(9, seed=2)
    for one in (other, batch):
        tickets.append(
            made.layer.submit_forward(one.x, one.ids, one.weights, out, save=True, seed=one.seed)
        )
        if one is other:
            made.layer.drop_newest()
    grad_in, grad_weights, grads = made.backward(batch)
    same(expected, Gradients(values_of(out), values_of(grad_in), grad_weights, grads))
    # Nobody keeps the arrays, nor waits.
    made.layer.submit_forward(
        batch.x.copy(), batch.ids.copy(), batch.weights.copy(), out.copy(), save=False, seed=0
    )


def test_the_numbers_of_dropout() -> None:
    """The oracle's generator, by the known answers of Random123 (kat_vectors, philox4x32 10)."""
    ones, pi = (1 << 32) - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, seed, expected in [
        ((0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]:
        assert tuple(philox(np.array(counter, np.uint64), seed)) == expected
    masks = np.stack([mask_of(0.3, 5, m, t, 2, 1000) for m in range(3) for t in range(30)])
    assert abs((masks == 0).mean() - 0.3) < 0.01
    assert abs(masks.mean() - 1) < 0.02


def test_dropout_is_off_where_nothing_is_kept() -> None:
    made = trained(AVX2, Format(BF16), SHAPES[0], training={"dropout": 0.5})
    other = trained(AVX2, Format(BF16), SHAPES[0])
    batch = made.batch(9)
    np.testing.assert_array_equal(made.forward(batch, save=False), other.forward(batch))
    assert np.any(made.forward(batch) != other.forward(batch, save=False))
    assert np.any(made.forward(replace(batch, seed=2), save=False) == other.forward(batch, False))
