"""What adapters that PEFT made add to each matrix of each expert: as PEFT itself computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from kt_kernel.adapter.changes import changes_of
from kt_kernel.adapter.files import read_adapter
from kt_kernel.serving.adapter import open_adapter

from .models import tiny
from .written_out import write_out

EXPERTS = 4
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODULES = r".*\.experts\.\d+\.(gate|up|down)_proj"


def trained(model: nn.Module, path: Path, **settings: Any) -> nn.Module:
    """Saves an adapter of random tensors."""
    model = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6} | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn(parameter.shape) * 0.1).bfloat16())
    model.save_pretrained(path)
    return model


def close(found: torch.Tensor | None, wanted: torch.Tensor) -> None:
    assert found is not None and found.shape == wanted.shape
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        (BOTH, {}),
        (BOTH[::-1], {"use_rslora": True}),
        (BOTH[:1], {}),
        (BOTH[1:], {}),
        (BOTH, {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_up_proj": 3}}),
        (BOTH, {"layers_to_transform": [1]}),
    ],
)
def test_parameters(parameters: list[str], settings: dict[str, Any], tmp_path: Path) -> None:
    model = trained(
        tiny("qwen3_moe", torch.float32),
        tmp_path,
        target_modules=[],
        target_parameters=parameters,
        **settings,
    )
    layers = open_adapter(str(tmp_path)).layers
    for number, layer in enumerate(model.base_model.model.model.layers):
        wrapper, wanted = layer.mlp.experts, {}
        while hasattr(wrapper, "parameter_name"):
            if wrapper.lora_A:
                wanted[wrapper.parameter_name] = wrapper.get_delta_weight("default")
            wrapper = wrapper.base_layer
        assert bool(wanted) == (number in layers)
        if not wanted:
            continue
        change = layers[number]
        assert change.misfit(EXPERTS, 32, 32) == "" and change.misfit(EXPERTS + 1)
        for expert in range(EXPERTS):
            for which, half in (("gate", 0), ("up", 1)):
                if "gate_up_proj" in wanted:
                    both = wanted["gate_up_proj"][expert]
                    close(change.matrix(which, expert, EXPERTS), both.chunk(2)[half])
                    close(change.matrix(which, expert, EXPERTS, interleaved=True), both[half::2])
                else:
                    assert change.matrix(which, expert, EXPERTS) is None
            if "down_proj" in wanted:
                close(change.matrix("down", expert, EXPERTS), wanted["down_proj"][expert])
            else:
                assert change.matrix("down", expert, EXPERTS) is None
            for name in ("gate_up_proj", "down_proj"):
                found = change.parameter(name, expert, EXPERTS)
                assert (found is None) == (name not in wanted)
                if found is not None:
                    close(found, wanted[name][expert])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank_pattern": {r"\d+.down_proj": 2}},
        {"target_modules": r".*\.experts\.\d+\.up_proj", "alpha_pattern": {"1.up_proj": 3}},
    ],
)
def test_modules_of_single_experts(settings: dict[str, Any], tmp_path: Path) -> None:
    model = trained(
        write_out(tiny("qwen3_moe", torch.float32)),
        tmp_path,
        **{"target_modules": MODULES, "lora_dropout": 0.1} | settings,
    )
    layers = open_adapter(str(tmp_path)).layers
    for number, layer in enumerate(model.base_model.model.model.layers):
        for expert in range(EXPERTS):
            for which in ("gate", "up", "down"):
                module = getattr(layer.mlp.experts[expert], f"{which}_proj")
                found = layers[number].matrix(which, expert, EXPERTS)
                if hasattr(module, "lora_A"):
                    close(found, module.get_delta_weight("default"))
                else:
                    assert found is None
            up = layers[number].matrix("up", expert, EXPERTS)
            gate = layers[number].matrix("gate", expert, EXPERTS)
            gate = torch.zeros_like(up) if gate is None else gate
            close(layers[number].parameter("gate_up_proj", expert, EXPERTS), torch.cat([gate, up]))


def test_other_modules(tmp_path: Path) -> None:
    """They are told apart: the server refuses them, and `merge_adapter` merges them."""
    trained(
        write_out(tiny("qwen3_moe", torch.float32)),
        tmp_path,
        target_modules=rf"({MODULES})|.*\.q_proj",
    )
    layers, others = changes_of(read_adapter(tmp_path))
    assert set(layers) == {f"model.layers.{i}.mlp.experts" for i in range(2)}
    assert set(others) == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    with pytest.raises(ValueError, match=r"modules other than experts \(self_attn.q_proj\)"):
        open_adapter(str(tmp_path))
