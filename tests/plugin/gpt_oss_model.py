"""A tiny gpt-oss as published: experts in MXFP4, stacked, with biases; all else in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import expert_weights  # noqa: F401 - finds test_mxfp4
import torch
from family_models import EXPERTS, FamilyReference, make
from safetensors.torch import load_file, save_file
from test_mxfp4 import dequantise

NAME = "GptOssForCausalLM"
SIZES = dict(
    hidden_size=128,
    intermediate_size=64,
    moe_intermediate_size=64,
    head_dim=64,
    num_attention_heads=4,
)
# Of a layer: gate_up [E, 2I, H], with gate and up in turn, and down [E, H, I].
Stacks = list[tuple[torch.Tensor, torch.Tensor]]


def make_gpt_oss(path: Path) -> Stacks:
    """Writes the model to a new folder. Returns the values of its experts' weights."""
    make(NAME, path, **SIZES)
    file = path / "model.safetensors"
    tensors = load_file(file)
    hidden, inter = SIZES["hidden_size"], SIZES["intermediate_size"]
    values: Stacks = []
    layers = sum(name.endswith("experts.down_proj") for name in tensors)
    for layer in range(layers):
        start, stacks = f"model.layers.{layer}.mlp.experts.", []
        for name, rows, columns in (
            ("gate_up_proj", 2 * inter, hidden),
            ("down_proj", hidden, inter),
        ):
            del tensors[start + name]
            blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 124, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
            tensors |= {f"{start}{name}_blocks": blocks, f"{start}{name}_scales": scales}
            matrices = zip(blocks.flatten(2), scales, strict=True)
            stacks.append(torch.stack([dequantise(*matrix).float() for matrix in matrices]))
        values.append((stacks[0], stacks[1]))
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (path / "config.json").write_text(json.dumps(config))
    return values


class Placed(Protocol):
    """A reference that puts each expert in the place so many behind its own."""

    def put(self, offset: int = 0) -> None: ...
    def logprobs(self, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor: ...


class GptOssReference(FamilyReference):
    """transformers in float32, with these weights of experts; ``offset``: each expert has those of
    the expert so many places before it."""

    def __init__(self, path: Path, values: Stacks) -> None:
        super().__init__(NAME, make(NAME, path, **SIZES))
        self._values = values

    def put(self, offset: int = 0) -> None:
        for (gate_up, down), (wanted_gate_up, wanted_down) in zip(
            self.stacks(), self._values, strict=True
        ):
            # transformers keeps them as [E, K, N].
            gate_up.copy_(wanted_gate_up.roll(offset, 0).transpose(1, 2))
            down.copy_(wanted_down.roll(offset, 0).transpose(1, 2))


def check_experts(
    name: str, answer: dict[str, Any], reference: Placed, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities are close to the reference's, and far from those with the weights of
    another expert in each. Returns both distances."""
    assert "error" not in answer, answer
    found = torch.tensor(answer["logprobs"]).flatten()
    distances = []
    for offset in (0, 1):
        reference.put(offset)
        distances.append((reference.logprobs(prompts, answer["tokens"]) - found).abs())
    near, far = distances
    print(f"{name}: median {near.median():.4f} mean {near.mean():.4f} far {far.mean():.3f}")
    assert near.median() < 0.05 and near.mean() < 0.1, (near.median(), near.mean())
    assert far.mean() > 10 * near.mean(), (far.mean(), near.mean())
    return near, far
