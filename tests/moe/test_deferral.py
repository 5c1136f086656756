"""Deferral against a model of its definition in plain PyTorch."""

import contextlib
import gc

import pytest
import torch
from moe_cases import Case, within

from kt_kernel import KTMoEWrapper, model_scope

LAYERS, K = 4, 3
CASES = [Case(seed=i, k=K) for i in range(LAYERS)]


def build(d, cases=CASES, first_idx=0, **options):
    with model_scope():
        return [
            case.wrapper(layer_idx=first_idx + i, max_deferred_experts_per_token=d, **options)
            for i, case in enumerate(cases)
        ]


def split(ids, scores, protected_k):
    """select_deferred_experts, written out."""
    protected = {
        int(e)
        for row, score in zip(ids, scores, strict=True)
        for e in row[score.argsort(descending=True, stable=True)[: max(protected_k, 0)]]
    }
    keep = torch.tensor([int(e) in protected for e in ids.flatten()], dtype=torch.bool)
    keep = keep.view(ids.shape)
    return ids.where(keep, -1), ids.where(~keep, -1)


def immediate(i, batch, d):
    """What layer i must give where nothing was handed to it, with the noise of its rows."""
    hidden, ids, weights = batch
    return CASES[i].reference_with_noise(hidden, split(ids, weights, K - d)[0], weights)


def definition(batches, d, cases=CASES, **options):
    """What each layer's sync must give in one pass, with the noise of its rows."""
    outputs, carried, carried_noise = [], 0.0, 0.0
    for i, (case, (hidden, ids, weights)) in enumerate(zip(cases, batches, strict=True)):
        now, later = ids, torch.full_like(ids, -1)
        if d and i < len(cases) - 1:
            now, later = split(ids, weights, case.k - d)
        y, noise = case.reference_with_noise(hidden, now, weights, **options)
        outputs.append((y + carried, noise + carried_noise))
        carried, carried_noise = case.reference_with_noise(hidden, later, weights, **options)
    return outputs


def batches_of(tokens, dtype=torch.float32, cases=CASES):
    return [case.batch(tokens, dtype) for case in cases]


def one_pass(layers, batches):
    outputs = []
    for layer, batch in zip(layers, batches, strict=True):
        layer.submit_forward(*batch)
        outputs.append(layer.sync_forward(batch[0]))
    return outputs


def agree(outputs, wanted):
    return all(within(y, *answer) for y, answer in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize("d", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_follows_its_definition(d, tokens):
    layers = build(d)
    for _ in range(2):  # a second pass receives nothing from the first
        batches = batches_of(tokens)
        assert agree(one_pass(layers, batches), definition(batches, d))


def test_none_is_off():
    batches = batches_of(3)
    assert agree(one_pass(build(None), batches), definition(batches, 0))


def test_all_deferred_makes_the_first_layer_zero():
    batches = batches_of(3)
    outputs = one_pass(build(K), batches)
    assert bool((outputs[0] == 0).all())
    parts = [CASES[i].reference_with_noise(*batches[i]) for i in (-2, -1)]
    assert within(outputs[-1], *map(sum, zip(*parts, strict=True)))


@pytest.mark.parametrize("method", ["AMXINT8", "INT4_G32"])
def test_other_methods_and_masks(method):
    cases = [Case(seed=i, k=K, method=method) for i in range(3)]
    mask = torch.tensor([True, False, False, False, True, False])
    layers = build(1, cases, gpu_experts_mask=mask)
    batches = batches_of(4, cases=cases)
    wanted = definition(batches, 1, cases, gpu_experts_mask=mask)
    assert agree(one_pass(layers, batches), wanted)


def test_the_sum_is_rounded_once():
    layers, batches = build(2), batches_of(6, torch.bfloat16)
    wanted = definition(batches, 2)
    for y, (r, noise) in zip(one_pass(layers, batches), wanted, strict=True):
        # half a unit in the last place of the exact sum, elementwise
        assert bool(((y.double() - r).abs() <= 2**-8 * r.abs() + 1.01 * noise[:, None]).all())


def test_forward_defers_too_and_inputs_may_change_afterwards():
    layers, batches = build(2), batches_of(5)
    wanted, outputs = definition(batches, 2), []
    for layer, batch in zip(layers, batches, strict=True):
        outputs.append(layer.forward(*batch))
        for tensor in batch:
            tensor.zero_()  # the deferred job still runs
    assert agree(outputs, wanted)


def test_the_first_layer_receives_nothing_from_a_pass_that_stopped():
    layers, batches = build(2), batches_of(3)
    for stop in range(1, LAYERS):
        one_pass(layers[:stop], batches[:stop])
        assert agree(one_pass(layers, batches), definition(batches, 2))


def test_a_skipped_layer_drops_what_was_for_it():
    layers, batches = build(2), batches_of(3)
    one_pass(layers[:1], batches[:1])
    assert within(layers[2].forward(*batches[2]), *immediate(2, batches[2], 2))
    # and the layer that was left out gets nothing later either
    one_pass(layers[:1], batches[:1])
    one_pass(layers[2:3], batches[2:3])
    assert within(layers[1].forward(*batches[1]), *immediate(1, batches[1], 2))


@pytest.mark.parametrize("other", [0, 1, 5])
def test_another_batch_size_in_between_drops_it(other):
    layers, batches = build(2), batches_of(3)
    different = CASES[1].batch(other)
    layers[0].forward(*batches[0])
    assert within(layers[1].forward(*different), *immediate(1, different, 2))
    assert within(layers[1].forward(*batches[1]), *immediate(1, batches[1], 2))


def test_a_wrong_call_in_between_changes_nothing():
    layers, batches = build(2), batches_of(3)
    wanted, outputs = definition(batches, 2), []
    for layer, batch in zip(layers, batches, strict=True):
        with contextlib.suppress(ValueError):
            layer.forward(batch[0], batch[1][:, :2], batch[2])
        outputs.append(layer.forward(*batch))
    assert agree(outputs, wanted)


def test_two_models_in_turns():
    main, draft = build(2), build(2, CASES[:2], first_idx=LAYERS)
    batches, drafted = batches_of(3), batches_of(3, cases=CASES[:2])
    outputs, others = [], []
    for i in range(LAYERS):
        outputs.append(main[i].forward(*batches[i]))
        if i < 2:
            others.append(draft[i].forward(*drafted[i]))
    assert agree(outputs, definition(batches, 2))
    assert agree(others, definition(drafted, 2, CASES[:2]))


def test_models_are_told_apart_without_a_scope():
    options = {"max_deferred_experts_per_token": 1}
    first = [CASES[i].wrapper(layer_idx=3 * i, **options) for i in range(2)]
    second = [CASES[i].wrapper(layer_idx=3 * i, **options) for i in range(2)]
    batches = batches_of(2, cases=CASES[:2])
    for layers in (first, second):
        assert agree(one_pass(layers, batches), definition(batches, 1, CASES[:2]))


def test_a_single_layer_never_defers():
    with model_scope():
        layer = CASES[0].wrapper(max_deferred_experts_per_token=2)
    batch = CASES[0].batch(4)
    assert agree([layer.forward(*batch)], [CASES[0].reference_with_noise(*batch)])


def test_the_last_layer_left_never_defers():
    layers, batches = build(2), batches_of(3)
    del layers[2:]
    gc.collect()
    assert agree(one_pass(layers, batches[:2]), definition(batches[:2], 2, CASES[:2]))


def test_layers_may_go_with_deferred_work_pending():
    for _ in range(5):
        layers = build(K)
        layers[0].submit_forward(*CASES[0].batch(200))
        del layers
        gc.collect()
    batches = batches_of(2)
    assert agree(one_pass(build(1), batches), definition(batches, 1))


def test_selection_is_offered_by_the_wrapper():
    ids, scores = torch.tensor([[0, 1], [2, 0]]), torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    for owner in (KTMoEWrapper, CASES[0].wrapper(load=False)):
        immediate, deferred = owner.select_deferred_experts(ids, scores, 1)
        assert immediate.tolist() == [[0, -1], [-1, 0]]
        assert deferred.tolist() == [[-1, 1], [2, -1]]
