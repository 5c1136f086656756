"""Adapters merged into checkpoints: the same outputs as with the adapter beside them."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from kt_kernel.sft import merge_adapter, save_adapter, wrap_experts

from .models import FAMILIES, fill_lora, tiny, tokens

ONE = dict(num_hidden_layers=1, first_k_dense_replace=0)
SETTINGS = dict(lora_rank=4, lora_alpha=6.0, cpuinfer_threads=2, threadpool_count=1)


def load(family: str, folder) -> torch.nn.Module:
    model = getattr(transformers, FAMILIES[family][1]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "fused") for family in FAMILIES),
        ("qwen3_moe", "per_expert"),
        ("mixtral", "per_expert"),
    ],
)
@pytest.mark.parametrize("original", [True, False], ids=["one by one", "in 3-D"])
def test_outputs(tmp_path, family, layout, original):
    """Checkpoints have the family's published names, or those of transformers' own modules."""
    tiny(family, torch.float32, **ONE).save_pretrained(
        tmp_path / "base", save_original_format=original, max_shard_size="20KB"
    )
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    base = tiny(family, torch.float32, **ONE)
    attention = LoraConfig(r=2, lora_alpha=5, target_modules=["o_proj"])
    model = get_peft_model(base, attention)
    fill_lora(wrap_experts(model, **SETTINGS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj.lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    model.eval()
    save_adapter(model, tmp_path / "adapter", layout=layout)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged, wanted = load(family, tmp_path / "merged")(tokens()).logits, model(tokens()).logits
    plain = load(family, tmp_path / "base")(tokens()).logits
    assert (wanted - plain).norm() > 0.1 * plain.norm()
    assert (merged - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("original", [True, False], ids=["one by one", "in 3-D"])
def test_an_adapter_of_one_parameter(tmp_path, parameter, original):
    """Trained by PEFT; the other one stays as it is."""
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=[], target_parameters=[f"mlp.experts.{parameter}"]
    )
    model = tiny("qwen3_moe", torch.float32, **ONE)
    model.save_pretrained(tmp_path / "base", save_original_format=original)
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.eval().save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = load("qwen3_moe", tmp_path / "merged")(tokens()).logits
    plain = load("qwen3_moe", tmp_path / "base")(tokens()).logits
    wanted = model(tokens()).logits
    assert (wanted - plain).norm() > 0.1 * plain.norm()
    assert (merged - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_a_draft_head_stays_as_it_is(tmp_path, layout):
    """Its layers are numbered from 0 again."""
    model = tiny("qwen3_moe", torch.float32, **ONE)
    model.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    draft = {
        name.replace("model.layers.0", "mtp.layers.0"): tensor.clone()
        for name, tensor in tensors.items()
        if ".experts." in name
    }
    save_file(tensors | draft, path, {"format": "pt"})
    fill_lora(wrap_experts(model, **SETTINGS))
    save_adapter(model, tmp_path / "adapter", layout=layout)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in draft.items():
        assert torch.equal(merged[name], tensor)
        assert not torch.equal(merged[name.replace("mtp.", "model.")], tensor)


def test_numbers_of_experts_have_several_names(tmp_path):
    """As in configurations of Ernie 4.5, here with the text model's inside another one."""
    model = tiny("qwen3_moe", torch.float32, **ONE)
    model.save_pretrained(tmp_path / "base")
    fill_lora(wrap_experts(model, **SETTINGS))
    save_adapter(model, tmp_path / "adapter")
    path = tmp_path / "base" / "config.json"
    text = re.sub(r"\bnum_(local_)?experts\b", "moe_num_experts", path.read_text())
    merged = []
    for number, config in enumerate((path.read_text(), text, f'{{"text_config": {text}}}')):
        path.write_text(config)
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / f"{number}")
        merged.append((tmp_path / f"{number}" / "model.safetensors").read_bytes())
    assert merged[0] == merged[1] == merged[2]


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
@pytest.mark.parametrize("original", [True, False], ids=["one by one", "in 3-D"])
def test_another_number_of_experts(tmp_path, layout, original):
    model = tiny("qwen3_moe", **ONE)
    fill_lora(wrap_experts(model, **SETTINGS))
    save_adapter(model, tmp_path / "adapter", layout=layout)
    for experts in (model.config.num_experts - 2, model.config.num_experts + 2):
        base, new = tmp_path / f"base{experts}", tmp_path / "new"
        tiny("qwen3_moe", **ONE | dict(num_experts=experts)).save_pretrained(
            base, save_original_format=original
        )
        with pytest.raises(ValueError, match=rf"has {experts} experts, but .* to another model"):
            merge_adapter(base, tmp_path / "adapter", new)
        assert not new.exists()


def test_refused(tmp_path):
    model = tiny("qwen3_moe", **ONE)
    model.save_pretrained(tmp_path / "base")
    fill_lora(wrap_experts(model, **SETTINGS))
    save_adapter(model, tmp_path / "adapter")
    tiny("qwen3_moe", **ONE | dict(moe_intermediate_size=64)).save_pretrained(tmp_path / "wide")
    tiny("qwen2_moe", num_hidden_layers=1, mlp_only_layers=[0]).save_pretrained(tmp_path / "dense")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    base, adapter, new = (tmp_path / name for name in ("base", "adapter", "new"))
    for given, error, text in (
        ((base, adapter, full), ValueError, "full: not empty; give a new folder"),
        ((tmp_path / "wide", adapter, new), ValueError, "the adapter changes .* of the model is"),
        (
            (tmp_path / "dense", adapter, new),
            ValueError,
            "no weights for 1 adapted modules, such as model.layers.0.mlp.experts",
        ),
        ((tmp_path / "none", adapter, new), FileNotFoundError, "none"),
        ((base, tmp_path / "none", new), FileNotFoundError, "none"),
    ):
        with pytest.raises(error, match=text):
            merge_adapter(*given)
    path = base / "config.json"
    config = json.loads(path.read_text())
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    for quantised in (fp8, {"text_config": config | fp8}):
        path.write_text(json.dumps(config | quantised))
        with pytest.raises(ValueError, match="the model is quantised; merge into its 16-bit"):
            merge_adapter(base, adapter, new)
    assert not new.exists()


def test_other_tensors_are_kept(tmp_path):
    model = tiny("qwen3_moe", **ONE)
    model.save_pretrained(tmp_path / "base")
    fill_lora(wrap_experts(model, **SETTINGS))
    save_adapter(model, tmp_path / "adapter")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(tensor, after[name]) != (".experts." in name), name
