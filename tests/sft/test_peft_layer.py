"""Wrapped experts inside a PeftModel: switching adapters, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import rescale_adapter_scale

from kt_kernel.sft import wrap_experts
from kt_kernel.sft.wrap import wrapped_experts

from .models import fill_lora, tiny, tokens

SETTINGS = dict(lora_rank=4, lora_alpha=6.0, cpuinfer_threads=2, threadpool_count=1)
CONFIG = LoraConfig(r=2, target_modules=["q_proj"])


def peft_model(config: LoraConfig = CONFIG, **settings) -> PeftModel:
    """One layer, both parts of its adapter not zero."""
    model = get_peft_model(tiny("qwen3_moe", torch.float32, num_hidden_layers=1), config)
    fill_lora(wrap_experts(model, **SETTINGS, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.default.weight"):
                parameter.fill_(0.1)
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_another_adapter_switches_that_of_the_experts_off():
    """So that a reference of TRL, an adapter of its own, does not change while the policy does."""
    model = peft_model()
    with model.disable_adapter():
        base = logits(model)
    policy, wanted = logits(model), trained(model)
    model.add_adapter("ref", CONFIG)  # its B is zero
    with pytest.warns(RuntimeWarning, match="adapter ref has no LoRA of the experts") as shown:
        model.set_adapter("ref")
    assert len(shown) == 1
    assert torch.equal(logits(model), base)
    assert not any("experts" in name for name in trained(model))
    model.set_adapter("default")
    assert torch.equal(logits(model), policy)
    assert trained(model) == wanted
    model.delete_adapter("default")
    assert torch.equal(logits(model), base)
    assert not any("experts" in name for name in trained(model))
    assert all(not module.active_adapters for module in wrapped_experts(model).values())


def test_arguments_by_name():
    model = tiny("qwen3_moe", torch.float32, num_hidden_layers=1)
    (module,) = wrap_experts(model, **SETTINGS).values()
    width = module.wrapper.hidden_size
    x, ids, weights = torch.ones(2, width), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    given = {"hidden_states": x, "top_k_index": ids, "top_k_weights": weights}
    assert torch.equal(module(**given), module(x, ids, weights))


def test_what_peft_cannot_do_with_experts():
    model = peft_model()
    with pytest.raises(NotImplementedError, match="adapter_names: the experts have one adapter"):
        model(tokens(), adapter_names=["__base__"] * len(tokens()))
    with pytest.raises(NotImplementedError, match="scaling: the experts have one adapter"):
        rescale_adapter_scale(model, 0.5).__enter__()


def test_a_reference_of_a_new_adapter_needs_no_warning():
    model = get_peft_model(tiny("qwen3_moe", torch.float32, num_hidden_layers=1), CONFIG)
    modules = wrap_experts(model, **SETTINGS)
    model.add_adapter("ref", CONFIG)
    with warnings.catch_warnings(action="error"):
        model.set_adapter("ref")
        model.set_adapter("default")
        fill_lora(modules)
        model.set_adapter("ref")


def test_lora_that_is_not_trained_stays_so():
    model = peft_model(sft_method="AMXBF16_SFT_SkipLoRA")
    before = trained(model)
    with model.disable_adapter():
        pass
    assert trained(model) == before and not any("experts" in name for name in before)


def test_adapters_that_are_off_in_inference_mode_and_then_in_training():
    model = peft_model()
    model.get_input_embeddings().weight.requires_grad_(True)
    with model.disable_adapter():
        with torch.inference_mode():
            model(tokens())
        model(tokens()).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad.any()


@pytest.mark.parametrize("call", ["merge_adapter", "merge_and_unload", "unload"])
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_merging_is_refused(call, wrapped_first):
    if wrapped_first:
        model = tiny("qwen3_moe", torch.float32, num_hidden_layers=1)
        fill_lora(wrap_experts(model, **SETTINGS))
        model = get_peft_model(model, CONFIG).eval()
    else:
        model = peft_model()
    before, names = logits(model), list(model.state_dict())
    with pytest.raises(NotImplementedError, match="of the experts are packed .*sft.merge_adapter"):
        getattr(model, call)()
    if not wrapped_first:
        assert list(model.state_dict()) == names
        assert torch.equal(logits(model), before)
    if call == "merge_adapter":
        model.unmerge_adapter()
        assert list(model.state_dict()) == names
        assert torch.allclose(logits(model), before, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (dict(target_modules="all-linear"), "experts.base_layer.* adapts these experts already"),
        (
            dict(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
            "experts.base_layer: PEFT adapts these experts already; accepted: target_modules",
        ),
        (dict(target_modules=["down_proj"]), "nor names such as 'down_proj' do"),
        (dict(target_modules=["q_proj"], use_dora=True), "use_dora is true, which is not supp"),
        (dict(target_modules=["q_proj"], lora_bias=True), "lora_bias is true, which is not sup"),
        (dict(target_modules=["q_proj"], bias="all"), 'bias is "all", which is not supported'),
        (
            dict(target_modules=["q_proj"], init_lora_weights="olora"),
            "adapter 'default' of the PeftModel: init_lora_weights is 'olora', which also changed",
        ),
    ],
)
def test_adapters_that_could_not_be_saved(config, text):
    model = tiny("qwen3_moe", torch.float32, num_hidden_layers=1)
    model = get_peft_model(model, LoraConfig(r=2, **config))
    parameters = dict(model.named_parameters())
    with pytest.raises(ValueError, match=text):
        wrap_experts(model, **SETTINGS)
    assert dict(model.named_parameters()) == parameters


def test_the_name_of_the_adapter():
    model = get_peft_model(tiny("qwen3_moe", num_hidden_layers=1), CONFIG, adapter_name="mine")
    with pytest.raises(ValueError, match="adapter 'default', but the PeftModel has .'mine'.; pass"):
        wrap_experts(model, **SETTINGS)
    wrap_experts(model, **SETTINGS, adapter_name="mine")
