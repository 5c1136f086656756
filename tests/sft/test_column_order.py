"""Weights whose columns are stored in another order (act-order of GPTQ): LoRA tensors and gradients
are in the model's own order all the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel.sft.lora import LORA_NAMES, SlotOrder, lora_shapes
from kt_kernel.testing.quantised import quantise, values_of
from kt_kernel.weights.formats import INT4_GROUP, WeightForm

from .layers import Batch, base_tensors, error, expected, lora_tensors, make_wrapper
from .oracle import MATRICES, Weights

EXPERTS, HIDDEN, INTER = 4, 64, 96
SIZES = dict(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INTER)
MOST = 1e-2


def ordered(generator: torch.Generator, which: set[str]):
    """INT4 weights [E] by matrix, all but the last expert's with their columns in another order,
    and the values that they stand for, float64 [E, N, K]."""
    matrices, values = [], {}
    for name, tensor in zip(MATRICES, base_tensors(EXPERTS, HIDDEN, INTER), strict=True):
        given = [quantise(w, WeightForm(INT4_GROUP, 32)) for w in tensor]
        if name in which:
            orders = [torch.randperm(tensor.shape[2], generator=generator).int() for _ in given]
            orders[-1] = None
            given = [replace(m, order=order) for m, order in zip(given, orders, strict=True)]
        matrices.append(given)
        values[name] = torch.stack([values_of(m) for m in given])
    return matrices, values


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 99),
    which=st.sets(st.sampled_from(MATRICES), min_size=1),
    mapping=st.lists(st.integers(0, EXPERTS - 1), min_size=EXPERTS, max_size=EXPERTS),
    full=st.booleans(),
)
def test_gradients(seed, which, mapping, full):
    """Against float64 with the values that the stored weights stand for."""
    matrices, values = ordered(torch.Generator().manual_seed(seed), which)
    wrapper = make_wrapper("RAWINT4_SFT", full_weight_grad=full, **SIZES)
    wrapper.load_weights_from_tensors(*matrices, torch.tensor(mapping))
    lora = lora_tensors(EXPERTS, hidden=HIDDEN, inter=INTER, seed=seed)
    wrapper.init_lora_weights(**lora)
    batch = Batch(9, seed, experts=EXPERTS, hidden=HIDDEN)
    base = Weights(**{name: stack[mapping] for name, stack in values.items()})
    wanted = expected(wrapper, batch, lora, mapping, base=base, full=full)
    y = wrapper.forward_sft(*batch.forward)
    x, grads, scores = wrapper.backward(batch.grad)
    assert error(y, wanted.y) < MOST
    assert error(x, wanted.x) < MOST and error(scores, wanted.scores) < MOST
    for name, gradient in zip(LORA_NAMES, wanted.lora, strict=True):
        assert error(grads[f"grad_{name}"], gradient) < MOST, name
    for name, gradient in zip(MATRICES, wanted.base, strict=False):
        assert error(grads[f"grad_{name}_proj"], gradient) < MOST, name


@given(data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_the_way_back_is_the_transpose(data):
    """⟨to_slots(a), b⟩ = ⟨a, to_logical(b)⟩ for any map and any orders: what a gradient needs."""
    experts, inter = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    expert = st.integers(0, experts - 1)
    order = SlotOrder(data.draw(st.lists(expert, min_size=experts, max_size=experts)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for slot in range(experts):
        if data.draw(st.booleans()):
            order.set_columns(slot, torch.randperm(inter, generator=generator).int())
    for name, shape in lora_shapes(experts, 2, 3, inter).items():
        a, b = (torch.randint(-9, 9, shape, generator=generator).float() for _ in range(2))
        there = (order.to_slots(name, a) * b).sum()
        assert there == (a * order.to_logical(name, b, torch.float32)).sum(), name


def test_weights_loaded_again_have_their_own_order():
    order = SlotOrder(range(2))
    a = torch.arange(8.0).view(2, 4, 1)
    order.set_columns(1, torch.tensor([3, 2, 1, 0], dtype=torch.int32))
    assert order.to_slots("up_lora_b", a)[1].flatten().tolist() == [7, 6, 5, 4]
    assert torch.equal(order.to_slots("up_lora_a", a), a)
    order.set_columns(1, None)
    assert torch.equal(order.to_slots("up_lora_b", a), a)
