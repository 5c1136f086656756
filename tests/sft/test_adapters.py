"""Adapters are PEFT's: PEFT loads ours with the same outputs, and we load PEFT's."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from kt_kernel.sft import load_adapter, save_adapter, wrap_experts
from kt_kernel.sft.families import SUPPORTED, is_fused
from kt_kernel.sft.peft_format import from_fused, from_single, to_fused, to_single

from .layers import E, lora_tensors
from .models import FAMILIES, fill_lora, tiny, tokens
from .written_out import write_out

# One layer: what a second one sees is rounded otherwise, and its router may choose otherwise.
ONE = dict(num_hidden_layers=1, first_k_dense_replace=0)
SETTINGS = dict(lora_rank=4, lora_alpha=6.0, cpuinfer_threads=2, threadpool_count=1)


def wrapped(family: str = "qwen3_moe", seed: int | None = 9, **settings):
    model = tiny(family)
    modules = wrap_experts(model, **(SETTINGS | settings))
    if seed is not None:
        fill_lora(modules, seed)
    return model, modules


def parameters(modules) -> list[torch.Tensor]:
    return [p.detach() for m in modules.values() for p in m.lora_parameters().values()]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_fused_layout(tmp_path, family):
    model, modules = wrapped(family)
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(tiny(family, torch.float32), tmp_path)
    plain = tiny(family)(tokens()).logits
    assert (loaded(tokens()).logits - plain).norm() > 0.05 * plain.norm()
    small = tiny(family, torch.float32, **ONE)
    fill_lora(wrap_experts(small, **SETTINGS))
    save_adapter(small, tmp_path / "one")
    loaded = PeftModel.from_pretrained(tiny(family, torch.float32, **ONE), tmp_path / "one")
    close(loaded(tokens()).logits, small(tokens()).logits)

    other, again = wrapped(family, seed=None)
    load_adapter(other, tmp_path)
    for a, b in zip(parameters(modules), parameters(again), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_peft_loads_one_module_for_each_expert(tmp_path, family):
    """Of models whose experts are written out, and (by PEFT's own conversion) of fused ones."""
    model = tiny(family, torch.float32, **ONE)
    modules = wrap_experts(model, **SETTINGS)
    fill_lora(modules)
    save_adapter(model, tmp_path, layout="per_expert")
    wanted = model(tokens()).logits
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    mixtral = family == "mixtral"
    name = "block_sparse_moe.experts.3.w2" if mixtral else "mlp.experts.3.down_proj"
    shape = tensors[f"base_model.model.model.layers.0.{name}.lora_A.weight"].shape
    assert shape == (4, 48 if mixtral else 32)
    loaded = PeftModel.from_pretrained(tiny(family, torch.float32, **ONE), tmp_path)
    close(loaded(tokens()).logits, wanted)
    if not mixtral:  # whose block has another name in transformers 5
        out = write_out(tiny(family, torch.float32, **ONE))
        close(PeftModel.from_pretrained(out, tmp_path)(tokens()).logits, wanted)

    other = tiny(family, torch.float32, **ONE)
    again = wrap_experts(other, **SETTINGS)
    load_adapter(other, tmp_path)
    for a, b in zip(parameters(modules), parameters(again), strict=True):
        assert torch.equal(a, b)


def test_a_peft_adapter_of_modules_is_loaded(tmp_path):
    """Trained by PEFT on written-out experts, attention included."""
    out = write_out(tiny("qwen3_moe", torch.float32, **ONE))
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=r".*(\.experts\.\d+\.(gate|up|down)_proj|q_proj)"
    )
    trained = get_peft_model(out, config)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn(parameter.shape) * 0.1).bfloat16())
    trained.save_pretrained(tmp_path)
    wanted = trained(tokens()).logits

    base = tiny("qwen3_moe", torch.float32, **ONE)
    plain = wrap_experts(base, **SETTINGS)
    with pytest.raises(ValueError, match="the model has no place for 2 tensors, such as .*q_proj"):
        load_adapter(base, tmp_path)
    assert not plain["model.layers.0.mlp.experts"].lora_parameters()["gate_lora_b"].any()
    model = get_peft_model(
        tiny("qwen3_moe", **ONE),
        LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]),
    )
    wrap_experts(model, **SETTINGS)
    load_adapter(model, tmp_path)
    close(model(tokens()).logits, wanted)


def test_a_peft_adapter_of_parameters_is_loaded(tmp_path):
    """Trained by PEFT on fused experts: gate and up share their A."""
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    trained = get_peft_model(tiny("qwen3_moe", torch.float32, **ONE), config)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn(parameter.shape) * 0.1).bfloat16())
    trained.save_pretrained(tmp_path)
    model = tiny("qwen3_moe", torch.float32, **ONE)
    (module,) = wrap_experts(model, **SETTINGS).values()
    load_adapter(model, tmp_path)
    close(model(tokens()).logits, trained(tokens()).logits)
    lora = module.lora_parameters()
    assert torch.equal(lora["gate_lora_a"], lora["up_lora_a"])
    twice = tiny("qwen3_moe", **ONE)
    wrap_experts(twice, **SETTINGS | dict(lora_rank=2, lora_alpha=3.0))
    with pytest.raises(
        ValueError, match="gate_up_proj has rank 4, and gate and up share its A; wrap"
    ):
        load_adapter(twice, tmp_path)


def test_patterns_of_peft_that_match_experts(tmp_path):
    """PEFT writes one for them into its configuration, though it does not adapt them."""
    model = tiny("qwen3_moe", torch.float32, **ONE)
    fill_lora(wrap_experts(model, **SETTINGS))
    model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear")).eval()
    assert model.peft_config["default"].rank_pattern
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(tiny("qwen3_moe", torch.float32, **ONE), tmp_path)
    with torch.no_grad():
        close(loaded(tokens()).logits, model(tokens()).logits)
    load_adapter(model, tmp_path)


@pytest.mark.parametrize("before", [True, False])
def test_beside_adapters_of_peft(tmp_path, before):
    """Attention's adapter is PEFT's own; one directory has both, in whichever order they came."""
    model = tiny("qwen3_moe")
    config = LoraConfig(r=8, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    if before:
        modules = wrap_experts(model, **SETTINGS)
        model = get_peft_model(model, config)
    else:
        model = get_peft_model(model, config)
        modules = wrap_experts(model, **SETTINGS)
    assert model.get_nb_trainable_parameters()[0] == sum(
        p.numel() for n, p in model.named_parameters() if "lora_" in n
    )
    assert all(p.requires_grad for m in modules.values() for p in m.parameters())
    fill_lora(modules)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_((torch.randn(parameter.shape) * 0.1).bfloat16())
    model.eval()
    save_adapter(model, tmp_path / "ours")
    loaded = PeftModel.from_pretrained(tiny("qwen3_moe", torch.float32), tmp_path / "ours")
    first = [n for n in loaded.state_dict() if "layers.0" in n and "lora_" in n]
    assert len(first) == 2 * 2 + 4
    for name, parameter in model.named_parameters():
        if "self_attn" in name and "lora_" in name:
            assert torch.equal(loaded.state_dict()[name], parameter.float())

    # PEFT's own checkpoint of the wrapped model has the experts as well: Trainer resumes from it.
    model.save_pretrained(tmp_path / "peft")
    other = get_peft_model(tiny("qwen3_moe"), config)
    again = wrap_experts(other, **SETTINGS)
    other.load_adapter(tmp_path / "peft", "default")
    for a, b in zip(parameters(modules), parameters(again), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad(), model.disable_adapter():
        assert not any(p.requires_grad for m in modules.values() for p in m.parameters())
        assert torch.equal(model(tokens()).logits, tiny_wrapped_logits())
    assert not torch.equal(model(tokens()).logits, tiny_wrapped_logits())
    another = get_peft_model(tiny("qwen3_moe"), config).eval()
    wrap_experts(another, **SETTINGS)
    load_adapter(another, tmp_path / "ours")
    assert torch.equal(another(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_reference_pass_between_forward_and_backward(depth):
    """The order of DPO and KL penalties: the policy's pass, one without the adapter, backward."""
    gradients = []
    for order in ("reference first", "policy first", "policy twice"):
        config = LoraConfig(r=4, target_modules=["q_proj"])
        model = get_peft_model(tiny("qwen3_moe", torch.float32), config)
        modules = wrap_experts(model, **SETTINGS, max_cache_depth=depth)
        fill_lora(modules)

        def reference(model=model):
            with torch.no_grad(), model.disable_adapter():
                return model(tokens()).logits

        if order == "reference first":
            reference()
        loss = model(tokens()).logits.square().mean()
        if order != "reference first":
            reference()
        if order == "policy twice":
            loss = (loss + model(tokens()).logits.square().mean()) / 2
            reference()
        loss.backward()
        lora = [p for m in modules.values() for p in m.lora_parameters().values()]
        gradients.append([p.grad for p in lora])
        assert all(gradient.any() for gradient in gradients[-1])
    for first, second, twice in zip(*gradients, strict=True):
        assert torch.equal(first, second)
        close(twice, first)


@pytest.mark.parametrize("peft", [False, True])
def test_trained_parameters_that_are_not_in_the_adapter(tmp_path, peft):
    model = tiny("qwen3_moe", **ONE)
    if peft:
        config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = get_peft_model(model, config)
    wrap_experts(model, **SETTINGS)
    with warnings.catch_warnings(action="error"):
        save_adapter(model, tmp_path)
    router = next(p for n, p in model.named_parameters() if n.endswith("mlp.gate.weight"))
    router.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="not contain 1 trained parameters, .*mlp.gate.weight"):
        save_adapter(model, tmp_path)


def tiny_wrapped_logits() -> torch.Tensor:
    return wrapped(seed=None)[0](tokens()).logits


def test_adapters_of_another_model_are_refused(tmp_path):
    model, _ = wrapped()
    save_adapter(model, tmp_path)
    for other, text in (
        (wrapped(lora_rank=3)[0], "gate_up_proj has rank 8; lora_rank=3 needs rank 3 or 6"),
        (
            wrapped(lora_alpha=8.0)[0],
            "has rank 8 and scaling 1.5, but .* lora_alpha / lora_rank = 2",
        ),
        (wrapped("mixtral")[0], "gate_lora_b has shape .* the model's has .*another model"),
    ):
        with pytest.raises(ValueError, match=text):
            load_adapter(other, tmp_path)
    small = tiny("qwen3_moe", **ONE)
    modules = wrap_experts(small, **SETTINGS)
    with pytest.raises(
        ValueError, match="the model has no place for 4 tensors, such as .*layers.1"
    ):
        load_adapter(small, tmp_path)
    save_adapter(small, tmp_path / "small")
    with pytest.raises(
        ValueError, match="layers.1.mlp.experts: the adapter has no tensors of this"
    ):
        load_adapter(model, tmp_path / "small")
    assert not any(p.any() for p in parameters(modules)[1::2])
    with pytest.raises(FileNotFoundError):
        load_adapter(model, tmp_path / "none")
    with pytest.raises(ValueError, match="no wrapped experts; call wrap_experts first"):
        save_adapter(tiny("qwen3_moe"), tmp_path)
    with pytest.raises(ValueError, match="layout='both'; accepted: 'fused', 'per_expert'"):
        save_adapter(model, tmp_path, layout="both")
    with pytest.raises(ValueError, match="no checkpoints of this family with experts of their own"):
        save_adapter(wrapped("gpt_oss")[0], tmp_path, layout="per_expert")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported: 'LORA'"),
        ({"use_dora": True}, "use_dora is true, which is not supported; accepted: false or null"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora', which also changed the ba"),
        ({"r": None}, "r is None; expected a number"),
    ],
)
def test_damaged_adapters(tmp_path, change, text):
    model, _ = wrapped()
    save_adapter(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"adapter_config.json: {text}"):
        load_adapter(model, tmp_path)


def test_missing_tensors(tmp_path):
    model, modules = wrapped()
    before = [p.clone() for p in parameters(modules)]
    for layout, name in (
        ("fused", "base_layer.lora_B.weight"),
        ("per_expert", "3.up_proj.lora_A.weight"),
    ):
        save_adapter(model, tmp_path, layout=layout)
        path = tmp_path / "adapter_model.safetensors"
        tensors = load_file(path)
        del tensors[f"base_model.model.model.layers.1.mlp.experts.{name}"]
        save_file(tensors, path)
        fill_lora(modules)
        with pytest.raises(ValueError, match=f"layers.1.mlp.experts: tensor {name} is missing"):
            load_adapter(model, tmp_path)
        for a, b in zip(parameters(modules), before, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("culprit", ["experts", "shape", "module", "finite", "dtype"])
def test_a_refused_adapter_changes_nothing(tmp_path, culprit):
    """Neither the experts nor what PEFT adapts, whichever of the two is refused."""
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])

    def adapted(seed):
        model = get_peft_model(tiny("qwen3_moe"), config)
        fill_lora(wrap_experts(model, **SETTINGS), seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "_proj.lora_" in name:
                    parameter.fill_(seed / 16)
        return model

    save_adapter(adapted(1), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    experts = "base_model.model.model.layers.1.mlp.experts.lora_B.weight"
    value = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    if culprit == "experts":
        tensors[experts] = tensors[experts][:-1]
    elif culprit == "shape":
        tensors[value] = tensors[value][:-1]
    elif culprit == "module":
        tensors[value.replace("v_proj", "k_proj")] = tensors[value].clone()
    elif culprit == "finite":
        tensors[experts][0, 0] = float("inf")
    else:
        tensors[experts] = tensors[experts].double() * 1e300
    text = {
        "experts": "down_lora_b has shape .* the model's has .*another model",
        "shape": "PEFT cannot load 8 tensors: .*size mismatch",
        "module": "PEFT has no place for 1 tensors, such as .*k_proj",
        "finite": "down_lora_b has a value that is NaN, infinite or beyond torch.float32",
        "dtype": "down_lora_b has a value that is NaN, infinite or beyond torch.float32",
    }[culprit]
    save_file(tensors, path)
    model = adapted(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"(?s){text}"):
        load_adapter(model, tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("layout", set(SUPPORTED.values()))
def test_layouts_lose_nothing(layout):
    lora = lora_tensors()
    for back in (
        from_fused(to_fused(lora, layout), E, 4, layout),
        from_single(to_single(lora, layout), E, layout),
    ):
        assert list(back) == list(lora)
        assert all(torch.equal(back[name], lora[name]) for name in lora)


def test_written_out_experts_are_the_same_model():
    """The helper of these tests."""
    model, out = tiny("qwen3_moe", torch.float64), write_out(tiny("qwen3_moe", torch.float64))
    assert not any(is_fused(m) for m in out.modules())
    assert sum(isinstance(m, nn.Linear) and "experts" in n for n, m in out.named_modules()) == 24
    assert torch.allclose(model(tokens()).logits, out(tokens()).logits, rtol=1e-9, atol=1e-9)
