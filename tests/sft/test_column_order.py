"""Weights whose columns are stored in another order (act-order of GPTQ): LoRA tensors and gradients
are in the model's own order all the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kt_kernel.sft.lora import LORA_NAMES, SlotOrder, lora_shapes
from kt_kernel.testing.quantised import pack_nibbles, quantise, unpack_nibbles, values_of
from kt_kernel.weights.formats import INT4_GROUP, WeightForm

from .layers import Batch, base_tensors, error, expected, lora_tensors, make_wrapper
from .oracle import MATRICES, Weights

EXPERTS, HIDDEN, INTER = 4, 64, 96
SIZES = dict(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INTER)
MOST = 1e-2
# A router weight's gradient is a sum of products of both signs: those of one pair of the cases here
# add up to a ninth of their absolute values.
MOST_OF_SCORES = 3e-2


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
    assert error(x, wanted.x) < MOST and error(scores, wanted.scores) < MOST_OF_SCORES
    for name, gradient in zip(LORA_NAMES, wanted.lora, strict=True):
        assert error(grads[f"grad_{name}"], gradient) < MOST, name
    for name, gradient in zip(MATRICES, wanted.base, strict=False):
        assert error(grads[f"grad_{name}_proj"], gradient) < MOST, name


def write(folder, matrices) -> None:
    """A compressed-tensors checkpoint of layer 5 with actorder."""
    tensors = {}
    for name, experts in zip(MATRICES, matrices, strict=True):
        for expert, matrix in enumerate(experts):
            columns = 2 * matrix.codes.shape[1]
            stored = torch.arange(columns) if matrix.order is None else matrix.order.long()
            group = torch.empty(columns, dtype=torch.int32)
            group[stored] = torch.arange(columns, dtype=torch.int32) // 32
            in_order = unpack_nibbles(matrix.codes)[:, stored.argsort()]  # the file keeps W's order
            place = f"model.layers.5.mlp.experts.{expert}.{name}_proj.weight_"
            tensors[f"{place}packed"] = pack_nibbles(in_order)
            tensors[f"{place}scale"] = matrix.scale
            tensors[f"{place}g_idx"] = group
    save_file(tensors, folder / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    group = {"weights": weights | {"actorder": "group"}, "targets": ["Linear"]}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


@pytest.mark.parametrize("method", ["RAWINT4_SFT", "AMXBF16_SFT"])
def test_from_a_checkpoint(tmp_path, method):
    """Kept quantised, or dequantised while it is read: the same gradients."""
    matrices, values = ordered(torch.Generator().manual_seed(1), set(MATRICES))
    write(tmp_path, matrices)
    wrapper = make_wrapper(method, weight_path=tmp_path, **SIZES)
    wrapper.load_weights(torch.arange(EXPERTS))
    lora = lora_tensors(EXPERTS, hidden=HIDDEN, inter=INTER)
    wrapper.init_lora_weights(**lora)
    batch = Batch(9, experts=EXPERTS, hidden=HIDDEN)
    wanted = expected(wrapper, batch, lora, base=Weights(**values))
    assert error(wrapper.forward_sft(*batch.forward), wanted.y) < MOST
    _, grads, _ = wrapper.backward(batch.grad)
    for name, gradient in zip(LORA_NAMES, wanted.lora, strict=True):
        assert error(grads[f"grad_{name}"], gradient) < MOST, name


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
