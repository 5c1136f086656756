"""A tiny Qwen3-MoE whose experts, and nothing else, are FP8."""

from __future__ import annotations

import json
from pathlib import Path

from expert_weights import HIDDEN, INTERMEDIATE, Weights
from safetensors.torch import load_file, save_file
from safetensors_files import FORMATS, expert_tensors
from tiny_model import LAYERS, make

SIZES = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "head_dim": 64}  # 64: for SGLang's kernels


def make_fp8(path: Path) -> Weights:
    """Writes the model. Returns the values of its experts' weights."""
    make(path, **SIZES)
    tensors = load_file(path / "model.safetensors")
    others = {name: t for name, t in tensors.items() if ".experts." not in name}
    experts, weights = expert_tensors(FORMATS["FP8"])
    save_file(others | experts, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    layers = [f"model.layers.{layer}" for layer in range(LAYERS)]
    config["quantization_config"] = FORMATS["FP8"].quantization | {
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"]
        + [f"{layer}.self_attn.{name}_proj" for layer in layers for name in ("q", "k", "v", "o")]
        + [f"{layer}.self_attn.qkv_proj" for layer in layers]
        + [f"{layer}.mlp.gate" for layer in layers],
    }
    (path / "config.json").write_text(json.dumps(config))
    return weights
