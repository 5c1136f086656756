"""`wrap_experts(full_weight_grad=True)`: base weights of experts as parameters, against
transformers."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer
from transformers.models.qwen3_moe import Qwen3MoeForCausalLM

from kt_kernel.sft import save_adapter, wrap_experts
from kt_kernel.testing.quantised import quantise
from kt_kernel.weights.formats import INT4_GROUP, WeightForm

from .layers import E, base_tensors, lora_tensors, make_wrapper, ready
from .models import fill_lora, tiny, tokens
from .trainers import losses, trainer_of

FULL = dict(
    sft_method="AMXBF16_SFT_SkipLoRA",
    full_weight_grad=True,
    lora_rank=1,
    cpuinfer_threads=2,
    threadpool_count=1,
)


def unfreeze_experts(model) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("experts.gate_up_proj", "experts.down_proj")))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_gradients_are_those_of_transformers(family):
    one = dict(num_hidden_layers=1)
    stock, model = tiny(family, torch.float64, **one), tiny(family, torch.float32, **one)
    names = set(stock.state_dict())
    parameters = {name: p for name, p in model.named_parameters() if "experts." in name}
    wrap_experts(model, **FULL)
    assert set(model.state_dict()) == names
    for name, parameter in parameters.items():
        assert dict(model.named_parameters())[name] is parameter
    for step in range(2):
        grads = []
        for each in (stock, model):
            unfreeze_experts(each)
            loss = each(tokens(seed=step), labels=tokens(seed=step)).loss
            each.zero_grad()
            loss.backward()
            grads.append({n: p.grad for n, p in each.named_parameters() if p.requires_grad})
        wanted, found = grads
        assert wanted.keys() == found.keys() and len(found) == 2
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() < 0.03 * gradient.norm(), (step, name)
        with torch.no_grad():
            for each in (stock, model):  # by exactly the same
                for name, parameter in each.named_parameters():
                    if name in wanted:
                        parameter.sub_(wanted[name].sign().to(parameter.dtype), alpha=2**-5)
                        parameter.copy_(parameter.bfloat16())


@pytest.mark.parametrize(
    ("method", "dtype", "most"),
    [
        ("AMXBF16_SFT_SkipLoRA", torch.float32, 0.01),
        ("AMXBF16_SFT_SkipLoRA", torch.bfloat16, 0.01),
        ("AMXINT8_SFT_SkipLoRA", torch.float32, 0.03),
    ],
)
def test_losses_are_those_of_transformers(tmp_path, method, dtype, most):
    """Trainer, some steps with AdamW: the losses are those of stock transformers with the same
    parameters trained. The saved model is one that transformers loads."""
    found = []
    for wrapped in (False, True):
        model = tiny("qwen3_moe", dtype)
        if wrapped:
            wrap_experts(model, **FULL | {"sft_method": method})
        unfreeze_experts(model)
        trainer = trainer_of(
            model,
            tmp_path / str(wrapped),
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=5e-3,
            save_strategy="no",
        )
        trainer.train()
        found.append(torch.tensor(losses(trainer)))
    stock, ours = found
    assert stock[-1] < 0.8 * stock[0]
    assert ((ours - stock).abs() < most * stock).all(), (ours, stock)
    model.save_pretrained(tmp_path / "saved")
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
    state = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_resuming_gives_the_same_losses(tmp_path):
    """Trainer's checkpoints list each expert, and resuming loads them as they are."""

    def trainer(folder) -> Trainer:
        torch.manual_seed(0)
        model = tiny("qwen3_moe", torch.float32)
        wrap_experts(model, **FULL)
        return trainer_of(model, folder, learning_rate=5e-3)

    whole, again = trainer(tmp_path / "whole"), trainer(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(again) == losses(whole) and len(set(losses(whole))) == 6


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_saved_models_are_loaded_again(tmp_path, family):
    model = tiny(family, torch.float32)
    wrap_experts(model, **FULL)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not any("experts" in key for key in found.missing_keys + found.unexpected_keys)
    state = model.state_dict()
    assert all(torch.equal(state[n], tensor) for n, tensor in wanted.items() if "experts" in n)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(tokens()).logits


def test_lora_and_base_weights_together():
    """Both are trained; a step on either is seen by the next forward pass."""
    model = tiny("qwen3_moe", torch.float32, num_hidden_layers=1)
    modules = wrap_experts(model, **FULL | dict(sft_method="AMXBF16_SFT", lora_rank=4))
    fill_lora(modules)
    (module,) = modules.values()
    assert any("lora_gate_A" in name for name in model.state_dict())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 8
    for group in ([module.gate_up_proj], list(module.lora_parameters().values())):
        before = logits(model)
        optimizer = torch.optim.SGD(group, lr=1.0)
        optimizer.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in group)
        optimizer.step()
        assert not torch.equal(logits(model), before)
    before = logits(model)
    module.down_proj.data.mul_(2)
    module.update_lora_weights()
    assert not torch.equal(logits(model), before)
    with pytest.raises(ValueError, match="its base weights are trained.*save_pretrained"):
        save_adapter(model, "nowhere")


def test_base_weights_that_change_between_forward_and_backward():
    model = tiny("qwen3_moe", torch.float32, num_hidden_layers=1)
    (module,) = wrap_experts(model, **FULL).values()
    x = torch.randn(3, 32)
    routes = torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.rand(3, 2)
    first, second = module(x, *routes), module(x, *routes)  # the second one is not kept
    with torch.no_grad():
        module.gate_up_proj.mul_(2)
    with pytest.raises(RuntimeError, match="update_base_weights while 1 forward passes wait"):
        module(x, *routes)
    first.sum().backward()  # of the weights that it was computed with
    module(x, *routes)
    with pytest.raises(RuntimeError, match="the LoRA or base weights changed between"):
        second.sum().backward()


def test_base_weights_stay_on_the_cpu():
    model = tiny("gpt_oss", torch.float32, num_hidden_layers=1)
    (module,) = wrap_experts(model, **FULL).values()
    model.to("meta")
    assert {p.device.type for p in module._parameters.values()} == {"cpu"}
    assert not any(module._parameters[f"{n}_proj_bias"].requires_grad for n in ("gate_up", "down"))
    assert module.lora_parameters()["gate_lora_a"].is_meta
    module.bfloat16()
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_biases_stay_when_base_weights_are_packed_again():
    generator = torch.Generator().manual_seed(1)
    wrapper = make_wrapper(full_weight_grad=True)
    h, i = wrapper.hidden_size, wrapper.moe_intermediate_size
    biases = {
        name: torch.randn(E, size, generator=generator)
        for name, size in (("gate_bias", i), ("up_bias", i), ("down_bias", h))
    }
    wrapper.load_weights_from_tensors(*base_tensors(), torch.arange(E), **biases)
    wrapper.init_lora_weights(**lora_tensors())
    x, ids, scores = torch.randn(4, h), torch.randint(E, (4, 3)), torch.rand(4, 3)
    before = wrapper.forward_sft(x, ids, scores, save_for_backward=False)
    for bias in biases.values():
        bias.zero_()  # the wrapper has its own
    wrapper.update_base_weights(*base_tensors())
    assert torch.equal(wrapper.forward_sft(x, ids, scores, save_for_backward=False), before)


def test_refused():
    model = tiny("qwen3_moe", torch.float32, num_hidden_layers=1)
    with pytest.raises(ValueError, match="full_weight_grad=True with from_checkpoint=True"):
        wrap_experts(model, **FULL, from_checkpoint=True, model_path="nowhere")
    with pytest.raises(ValueError, match="1 experts on the GPU with full_weight_grad=True"):
        wrap_experts(model, **FULL, num_gpu_experts=1)
    with pytest.raises(ValueError, match="full_weight_grad=True with a PeftModel"):
        wrap_experts(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), **FULL)
    with pytest.raises(TypeError, match="layer 5: gate_proj must be a tensor, got list"):
        ready("AMXINT8_SFT").update_base_weights([], [], [])
    wrapper = make_wrapper("RAWINT4_SFT")
    base = [[quantise(w, WeightForm(INT4_GROUP, 32)) for w in m] for m in base_tensors()]
    wrapper.load_weights_from_tensors(*base, torch.arange(E))
    with pytest.raises(ValueError, match="update_base_weights with method RAWINT4_SFT, which keep"):
        wrapper.update_base_weights(*base)
