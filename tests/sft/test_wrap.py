"""Every supported family: the wrapped model against transformers' own in float64, with LoRA put
into its weights."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.func import functional_call

from kt_kernel.sft import wrap_experts
from kt_kernel.sft.families import SUPPORTED, is_fused

from .models import FAMILIES, fill_lora, tiny, tokens

RANK, ALPHA = 4, 6.0
SETTINGS = dict(lora_rank=RANK, lora_alpha=ALPHA, cpuinfer_threads=2, threadpool_count=1)


def delta(family: str, lora: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What LoRA adds to the family's own parameters, differentiable."""
    each = {
        m: ALPHA / RANK * lora[f"{m}_lora_b"] @ lora[f"{m}_lora_a"] for m in ("gate", "up", "down")
    }
    if family == "gpt_oss":  # [E, H, 2I], gate and up alternate
        both = torch.stack([each["gate"], each["up"]], 2).flatten(1, 2)
        return {"gate_up_proj": both.transpose(1, 2), "down_proj": each["down"].transpose(1, 2)}
    return {"gate_up_proj": torch.cat([each["gate"], each["up"]], 1), "down_proj": each["down"]}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    ids = tokens()
    # One layer: what a second one sees is rounded otherwise, and its router may choose otherwise.
    one = dict(num_hidden_layers=1, first_k_dense_replace=0)
    whole, model = tiny(family, torch.float64, **one), tiny(family, torch.float32, **one)
    plain = model(ids).logits
    modules = wrap_experts(model, **SETTINGS)
    assert len(modules) == 1
    assert not any(is_fused(module) for module in model.modules())
    # B is zero: nothing but the rounding of x and h to bf16 is different.
    assert (model(ids).logits - plain).abs().max() < 0.03 * plain.abs().max()

    fill_lora(modules)
    model.get_input_embeddings().weight.requires_grad_(True)
    logits = model(ids).logits
    loss_of(logits, ids).backward()

    parameters = dict(whole.named_parameters())
    leaves = {
        path: {n: p.detach().double().requires_grad_() for n, p in m.lora_parameters().items()}
        for path, m in modules.items()
    }
    changed = {
        f"{path}.{name}": parameters[f"{path}.{name}"] + change
        for path, lora in leaves.items()
        for name, change in delta(family, lora).items()
    }
    wanted = functional_call(whole, changed, (ids,)).logits
    loss_of(wanted, ids).backward()
    assert (wanted - plain).abs().max() > 0.05 * plain.abs().max()  # LoRA does something
    assert (logits - wanted).norm() < 0.02 * wanted.norm()
    for path, module in modules.items():
        for name, parameter in module.lora_parameters().items():
            reference = leaves[path][name].grad
            assert (parameter.grad - reference).norm() < 0.05 * reference.norm(), (path, name)
    found, reference = (m.get_input_embeddings().weight.grad for m in (model, whole))
    assert (found - reference).norm() < 0.05 * reference.norm()


def test_the_list_is_complete():
    names = {type(m).__name__ for family in FAMILIES for m in tiny(family).modules() if is_fused(m)}
    assert names == set(SUPPORTED)


def test_base_weights_are_released_and_the_rest_is_frozen():
    model = tiny("qwen3_moe")
    experts = [weakref.ref(m.gate_up_proj) for m in model.modules() if is_fused(m)]
    modules = wrap_experts(model, **SETTINGS)
    gc.collect()
    assert len(experts) == 2 and not any(ref() is not None for ref in experts)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 12 and all(".mlp.experts.lora_" in name for name in trained)
    assert list(modules) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert [m.wrapper.layer_idx for m in modules.values()] == [0, 1]


@pytest.mark.parametrize("method", ["AMXBF16_SFT", "AMXINT8_SFT", "AMXINT4_1KGroup_SFT"])
def test_from_a_checkpoint(tmp_path, method):
    """The model's own experts are not read: they are on meta here."""
    model, own = tiny("qwen3_moe"), tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    for module in model.modules():
        if is_fused(module):
            module.to("meta")
    settings = SETTINGS | dict(sft_method=method, group_size=32)
    path = "model_path" if method == "AMXBF16_SFT" else "weight_path"
    wrap_experts(model, from_checkpoint=True, **{path: tmp_path}, **settings)
    wrap_experts(own, **settings)
    assert torch.equal(model(tokens()).logits, own(tokens()).logits)
    # A checkpoint without the second layer: the first one is put back.
    short = tiny("qwen3_moe", num_hidden_layers=1)
    short.save_pretrained(tmp_path / "short")
    again = tiny("qwen3_moe")
    for module in again.modules():
        if is_fused(module):
            module.to("meta")
    modules = dict(again.named_modules())
    with pytest.raises((KeyError, ValueError), match="layer 1"):
        wrap_experts(again, from_checkpoint=True, **{path: tmp_path / "short"}, **settings)
    assert dict(again.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in again.parameters())
    with pytest.raises(RuntimeError, match=f"{path}, which is not set"):
        wrap_experts(tiny("qwen3_moe"), from_checkpoint=True, **settings)


def test_refused():
    with pytest.raises(ValueError, match="Linear: no module with experts in 3-D parameters"):
        wrap_experts(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="lora_rnak"):
        wrap_experts(tiny("qwen3_moe"), lora_rnak=3)
    with pytest.raises(ValueError, match="full_weight_grad=True with from_checkpoint=True"):
        wrap_experts(tiny("qwen3_moe"), full_weight_grad=True, from_checkpoint=True)
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts: activation GELU.* not supp"):
        wrap_experts(tiny("qwen3_moe", hidden_act="gelu"))
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got dict"):
        wrap_experts({})
    model = tiny("qwen3_moe")
    for module in model.modules():
        if is_fused(module):
            module.__class__ = type("OtherExperts", (type(module),), {})
    with pytest.raises(ValueError, match="class OtherExperts was not tested; tested: DeepseekV2E"):
        wrap_experts(model, **SETTINGS)
    assert wrap_experts(model, allow_untested=True, **SETTINGS)


def last_experts(model: torch.nn.Module) -> torch.nn.Module:
    return [module for module in model.modules() if is_fused(module)][-1]


def spoil_dtype(model: torch.nn.Module) -> None:
    experts = last_experts(model)
    experts.down_proj = torch.nn.Parameter(experts.down_proj.double())


def spoil_value(model: torch.nn.Module) -> None:
    with torch.no_grad():
        last_experts(model).gate_up_proj[3, -1, 0] = float("inf")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (dict(config={}), TypeError, "config must be a KTConfig or None, got dict"),
        (dict(from_checkpoint=1), TypeError, "from_checkpoint must be True or False, got 1"),
        (dict(from_checkpoint=True), RuntimeError, "from model_path, which is not set"),
        (dict(allow_untested=None), TypeError, "allow_untested must be True or False, got None"),
        (dict(adapter_name="a.b"), ValueError, "adapter_name='a.b'; accepted: a name without dots"),
        (dict(adapter_name=7), TypeError, "adapter_name must be a string, got 7"),
        (dict(lora_dtype=torch.int8), ValueError, "lora_dtype=torch.int8; accepted: float dtypes"),
        (dict(lora_dtype="bf16"), TypeError, "lora_dtype must be a torch.dtype, got 'bf16'"),
        (dict(lora_device="nowhere"), RuntimeError, "lora_device='nowhere' cannot be used"),
        (dict(lora_device=1), TypeError, "lora_device must be a torch.device, a string or None"),
        (dict(nonfinite="skip"), ValueError, "nonfinite='skip'; accepted: 'error', 'propagate'"),
        (dict(lora_rank=0), ValueError, "lora_rank=0; accepted: 1 to 4096"),
        (dict(sft_method="BF16"), ValueError, "is for mode='inference'"),
        (
            dict(sft_method="AMXINT4_KGroup_SFT", group_size=64),
            ValueError,
            "hidden_size=32 is not divisible by the group size 64",
        ),
        (dict(sft_method="FP8_SFT"), TypeError, "layer 0: gate_proj must be a sequence of 4"),
        (dict(cpuinfer_threads=0), ValueError, "cpuinfer_threads=0; accepted: 1 or more"),
        (
            dict(from_checkpoint=True, model_path="/no/such/place"),
            FileNotFoundError,
            "/no/such/place",
        ),
        (dict(spoil=spoil_dtype), ValueError, "layer 1: down_proj has dtype torch.float64; acc"),
        (dict(spoil=spoil_value), ValueError, "layer 1: up_proj has a NaN or .* in expert 3; acc"),
    ],
)
def test_a_refused_call_changes_nothing(arguments, error, text):
    model = tiny("qwen3_moe")
    if spoil := arguments.get("spoil"):
        spoil(model)
    modules = dict(model.named_modules())
    parameters = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = {name: value for name, value in arguments.items() if name != "spoil"}
    with pytest.raises(error, match=text):
        wrap_experts(model, **(SETTINGS | given))
    assert dict(model.named_modules()) == modules
    for name, p in model.named_parameters():
        before, required = parameters[name]
        assert p is before and p.requires_grad == required, name
        assert torch.equal(p, values[name]), name
