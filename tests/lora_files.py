"""Adapters of experts as PEFT writes them, and what they add, in float64."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK, ALPHA = 4, 6.0
MODULE = "base_model.model.model.layers.{}.mlp.experts"

#: [E, N, K] by layer and matrix.
Deltas = dict[int, dict[str, torch.Tensor]]


def write(
    folder: Path,
    *,
    layers: Iterable[int] = (3,),
    experts: int = 6,
    hidden: int = 64,
    inter: int = 48,
    layout: str = "fused",
    size: float = 0.3,
    more: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> Deltas:
    """Writes an adapter with random tensors; the layouts are those of ``save_adapter``.

    ``changes`` are settings of adapter_config.json, and ``more`` other tensors of the file.
    """
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * size).bfloat16()

    tensors: dict[str, torch.Tensor] = dict(more or {})
    deltas: Deltas = {}
    for layer in layers:
        module, found = MODULE.format(layer), {}
        if layout == "fused":
            for wrap, name, rows, columns in (
                ("base_layer.", "gate_up", 2 * inter, hidden),
                ("", "down", hidden, inter),
            ):
                a, b = random(experts * RANK, columns), random(rows, RANK * experts)
                tensors[f"{module}.{wrap}lora_A.weight"] = a
                tensors[f"{module}.{wrap}lora_B.weight"] = b
                by_expert = b.double().reshape(rows, RANK, experts)
                stacked = a.double().reshape(experts, RANK, columns)
                found[name] = torch.einsum("ore,eri->eoi", by_expert, stacked) * ALPHA / RANK
            found["gate"], found["up"] = found.pop("gate_up").chunk(2, 1)
        else:
            for which, rows, columns in (
                ("gate", inter, hidden),
                ("up", inter, hidden),
                ("down", hidden, inter),
            ):
                a, b = random(experts, RANK, columns), random(experts, rows, RANK)
                for expert in range(experts):
                    name = f"{module}.{expert}.{which}_proj"
                    tensors[f"{name}.lora_A.weight"] = a[expert].clone()
                    tensors[f"{name}.lora_B.weight"] = b[expert].clone()
                found[which] = b.double() @ a.double() * ALPHA / RANK
        deltas[layer] = {name: found[name] for name in ("gate", "up", "down")}
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.1,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return deltas
