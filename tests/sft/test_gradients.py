"""Outputs and gradients against the oracle: methods, maps, masks, dtypes, duplicates."""

from __future__ import annotations

import pytest
import torch

from kt_kernel import SFT_METHODS
from kt_kernel.sft.lora import LORA_NAMES
from kt_kernel.testing.quantised import quantise
from kt_kernel.weights.formats import FP8_BLOCK, INT4_GROUP, MXFP4, WeightForm, WeightFormat

from .layers import (
    Batch,
    E,
    H,
    base_tensors,
    error,
    expected,
    lora_tensors,
    make_wrapper,
    ready,
)

IDENTITY = torch.arange(E)
MOST = 1e-2  # error of a whole tensor; of methods with int8 activations three times that
QUANTISED = {
    "FP8_SFT": WeightForm(FP8_BLOCK),
    "AMXFP8_SFT": WeightForm(FP8_BLOCK),
    "RAWINT4_SFT": WeightForm(INT4_GROUP, 32),
    "MXFP4_SFT": WeightForm(MXFP4),
    "LLAMAFILE_SFT": WeightForm(WeightFormat("Q8_0")),
}


def compare(wrapper, batch, lora, mapping=None, most=MOST, **options):
    wanted = expected(wrapper, batch, lora, mapping, **options)
    y = wrapper.forward_sft(*batch.forward)
    x, grads, scores = wrapper.backward(batch.grad)
    assert y.dtype == x.dtype == torch.bfloat16 and scores.dtype == torch.float32
    assert error(y, wanted.y) < most
    assert error(x, wanted.x) < most and error(scores, wanted.scores) < most
    for name, gradient in zip(LORA_NAMES, wanted.lora, strict=True):
        assert error(grads[f"grad_{name}"], gradient) < most, name
    return grads, wanted


@pytest.mark.parametrize("method", sorted(SFT_METHODS))
def test_methods(method):
    stem = method.removesuffix("_SkipLoRA")
    wrapper = make_wrapper(method, group_size=32)
    base = base_tensors()
    if stem in QUANTISED:
        base = [[quantise(w, QUANTISED[stem]) for w in matrix] for matrix in base]
    wrapper.load_weights_from_tensors(*base, IDENTITY)
    lora, batch = lora_tensors(), Batch(9)
    wrapper.init_lora_weights(**lora)
    integer = wrapper._settings.method.int8_activations
    grads, _ = compare(
        wrapper, batch, lora, most=3 * MOST if integer else MOST, through_lora=stem == method
    )
    assert all(gradient.any() for gradient in grads.values()) == (stem == method)


def test_maps_masks_and_duplicates():
    """Slots 1 and 4 hold the same expert, none holds experts 2 and 5; slot 3 is on the GPU."""
    mapping = [3, 1, 0, 4, 1, 4]
    mask = torch.zeros(E, dtype=torch.bool)
    mask[3] = True
    wrapper = make_wrapper(gpu_experts_mask=mask, max_cache_depth=2)
    wrapper.load_weights_from_tensors(*base_tensors(), torch.tensor(mapping, dtype=torch.int32))
    lora, batch = lora_tensors(), Batch(12)
    wrapper.init_lora_weights(**lora)
    batch.ids[0] = torch.tensor([1, 1, 4])
    batch.ids[1] = torch.tensor([3, -1, E])
    grads, _ = compare(wrapper, batch, lora, mapping)
    for name in LORA_NAMES:
        assert not grads[f"grad_{name}"][[2, 5]].any()
        assert grads[f"grad_{name}"][[0, 1]].any()
    assert not wrapper.forward_sft(*batch.forward)[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype):
    """LoRA tensors of any float dtype, not contiguous; inputs of any dtype."""
    lora = {
        name: tensor.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
        for name, tensor in lora_tensors().items()
    }
    wrapper, plain, batch = ready(), ready(), Batch(4)
    wrapper.init_lora_weights(**lora)
    given = batch.x.to(dtype), batch.ids.to(torch.int16), batch.scores.to(dtype)
    plain_scores = given[2].float()
    y = wrapper.forward_sft(*given)
    assert torch.equal(y, plain.forward_sft(batch.x, batch.ids, plain_scores))
    found, wanted = wrapper.backward(batch.grad.to(dtype)), plain.backward(batch.grad)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
    for name in LORA_NAMES:
        gradient = found[1][f"grad_{name}"]
        assert gradient.dtype == dtype and gradient.is_contiguous()
        assert torch.equal(gradient, wanted[1][f"grad_{name}"].to(dtype))


def test_gradients_are_fresh_and_not_summed_over_calls():
    wrapper, batch = ready(), Batch(4)
    results = []
    for _ in range(2):
        wrapper.forward_sft(*batch.forward)
        results.append(wrapper.backward(batch.grad))
    for name, first in results[0][1].items():
        second = results[1][1][name]
        assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_gradients_of_the_base_weights():
    mapping = [3, 1, 0, 4, 1, 4]
    wrapper = make_wrapper(full_weight_grad=True)
    wrapper.load_weights_from_tensors(*base_tensors(), torch.tensor(mapping))
    lora, batch = lora_tensors(), Batch(8)
    wrapper.init_lora_weights(**lora)
    grads, wanted = compare(wrapper, batch, lora, mapping, full=True)
    for name, gradient in zip(("gate", "up", "down"), wanted.base, strict=True):
        assert error(grads[f"grad_{name}_proj"], gradient) < MOST, name
    other = base_tensors(seed=4)
    before = wrapper.forward_sft(*batch.forward, save_for_backward=False)
    bad = other[2].clone()
    bad[4, 2, 3] = float("nan")
    with pytest.raises(ValueError, match="layer 5: down_proj has a NaN or infinite .* expert 4"):
        wrapper.update_base_weights(*other[:2], bad)
    assert torch.equal(wrapper.forward_sft(*batch.forward, save_for_backward=False), before)
    wrapper.update_base_weights(*other)
    fresh = make_wrapper()
    fresh.load_weights_from_tensors(*other, torch.tensor(mapping))
    fresh.init_lora_weights(**lora)
    assert torch.equal(wrapper.forward_sft(*batch.forward), fresh.forward_sft(*batch.forward))


def test_dropout():
    """Another mask in each pass, the same in its backward, none where nothing is kept."""
    wrapper, plain, batch = ready(lora_dropout=0.5), ready(), Batch(64)
    torch.manual_seed(1)
    first = wrapper.forward_sft(*batch.forward)
    x, grads, _ = wrapper.backward(batch.grad)
    second = wrapper.forward_sft(*batch.forward)
    wrapper.clear_pending()
    torch.manual_seed(1)
    assert torch.equal(wrapper.forward_sft(*batch.forward), first)
    assert not torch.equal(first, second)
    kept = wrapper.forward_sft(*batch.forward, save_for_backward=False)
    assert torch.equal(kept, plain.forward_sft(*batch.forward))
    wrapper.clear_pending()

    # Finite differences along one direction of one B, with the seed held.
    direction = torch.zeros_like(wrapper.down_lora_b)
    direction[:] = torch.randn(direction.shape, generator=torch.Generator().manual_seed(2)) * 0.5
    outputs = []
    for sign in (1, -1):
        lora = lora_tensors()
        lora["down_lora_b"] = (lora["down_lora_b"] + sign * direction).bfloat16().float()
        wrapper.init_lora_weights(**lora)
        torch.manual_seed(1)
        outputs.append((wrapper.forward_sft(*batch.forward).double() * batch.grad.double()).sum())
        wrapper.clear_pending()
    slope = (outputs[0] - outputs[1]) / 2
    step = (lora_tensors()["down_lora_b"] + direction).bfloat16().double() - lora[
        "down_lora_b"
    ].double()
    wanted = (grads["grad_down_lora_b"].double() * step / 2).sum()
    assert abs(slope - wanted) < 0.05 * abs(wanted)
    assert x.shape == (64, H)
