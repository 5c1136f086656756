"""A tiny Kimi-K2 as published: DeepSeek-V3's class, experts in INT4 of compressed-tensors in groups
of 32; all else in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from family_models import FamilyReference, make
from gpt_oss_model import Stacks
from safetensors.torch import load_file, save_file
from safetensors_files import FORMATS

from kt_kernel.testing import int4_settings

NAME = "DeepseekV3ForCausalLM"
SIZES = dict(hidden_size=256, moe_intermediate_size=64, num_hidden_layers=3)
QUANTISATION = int4_settings(
    [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]
)


def make_kimi(path: Path) -> Stacks:
    """Writes the model to a new folder. Returns the values of its experts' weights: of each layer,
    gate_up [E, 2I, H] and down [E, H, I]."""
    make(NAME, path, **SIZES)
    file, form = path / "model.safetensors", FORMATS["RAWINT4"]
    tensors = load_file(file)
    values: dict[tuple[int, str], list[torch.Tensor]] = {}
    for name in sorted(name for name in tensors if ".mlp.experts." in name):
        *_, layer, _, _, expert, projection, _ = name.split(".")
        parts = form.make(*tensors.pop(name).shape)
        tensors |= {f"{name.removesuffix('weight')}{part}": one for part, one in parts.items()}
        values.setdefault((int(layer), projection), []).append(form.values(dict(parts)).float())
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "quantization_config": QUANTISATION}
    (path / "config.json").write_text(json.dumps(config))

    def stack(layer: int, *names: str) -> torch.Tensor:
        return torch.cat([torch.stack(values[layer, f"{name}_proj"]) for name in names], 1)

    layers = sorted({layer for layer, _ in values})
    return [(stack(layer, "gate", "up"), stack(layer, "down")) for layer in layers]


class KimiReference(FamilyReference):
    """transformers in float32, with these weights of experts; ``offset``: as in GptOssReference."""

    def __init__(self, path: Path, values: Stacks) -> None:
        super().__init__(NAME, make(NAME, path, **SIZES))
        self._values = values

    def put(self, offset: int = 0) -> None:
        for stacks, wanted in zip(self.stacks(), self._values, strict=True):
            for stack, values in zip(stacks, wanted, strict=True):
                stack.copy_(values.roll(offset, 0))
