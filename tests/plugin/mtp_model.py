"""A tiny GLM-4.5 with a layer that predicts a further token (MTP). transformers does not write it.

The layer is a copy of the last one that reads the token's embedding alone. In the model, attention
and the first layer add little to it. So the tokens that the layer predicts are often the model's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family_models import EXPERTS, LAYERS, make
from safetensors.torch import load_file, save_file

NAME = "Glm4MoeForCausalLM"


def make_mtp(path: Path, offset: int = 0, **changed: Any) -> Path:
    """Writes the model to a new folder. offset: each expert of the added layer has the weights of
    the expert so many places before it. changed: settings of its configuration."""
    make(NAME, path, num_nextn_predict_layers=1, **changed)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight") or name == "model.layers.0.mlp.down_proj.weight":
            tensor.mul_(0.001)
    last, added = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    for name in [name for name in tensors if name.startswith(last)]:
        source = name
        if offset and ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, matrix = after.partition(".")
            source = f"{before}.experts.{(int(number) - offset) % EXPERTS}.{matrix}"
        tensors[added + name.removeprefix(last)] = tensors[source].clone()
    embedding = tensors["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    ones = torch.ones(hidden, dtype=embedding.dtype)
    # The norm before this projection makes embeddings larger.
    same = torch.eye(hidden) * embedding.float().square().mean().sqrt()
    reads = torch.cat((same, torch.zeros(hidden, hidden)), 1).to(embedding.dtype)
    tensors |= {
        f"{added}enorm.weight": ones,
        f"{added}hnorm.weight": ones.clone(),
        f"{added}eh_proj.weight": reads,
        f"{added}embed_tokens.weight": embedding.clone(),
        f"{added}shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        f"{added}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path
