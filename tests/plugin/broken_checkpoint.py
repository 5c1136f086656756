"""Checkpoints whose faults only show when a worker loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_model import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS

METHOD = "RAWINT4"
LINE = f"tensor 'model.layers.{LAYERS - 1}.mlp.experts.1.up_proj.weight_scale': the scale at [3, 1]"
_GROUP = 32
# See `write_without_a_matrix`; to be put behind the engine's name.
LACKING = "did not load weights of hot experts: 1 (up of w13_weight). The checkpoint lacks them"


def write(path: Path) -> Path:
    """Writes 4-bit experts for the model of tiny_model.py. One of their scales is not a number."""
    tensors = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, rows, columns in (
                ("gate_proj", INTERMEDIATE, HIDDEN),
                ("up_proj", INTERMEDIATE, HIDDEN),
                ("down_proj", HIDDEN, INTERMEDIATE),
            ):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{prefix}.weight_packed"] = torch.zeros(
                    rows, columns // 8, dtype=torch.int32
                )
                tensors[f"{prefix}.weight_scale"] = torch.ones(
                    rows, columns // _GROUP, dtype=torch.bfloat16
                )
    tensors[f"model.layers.{LAYERS - 1}.mlp.experts.1.up_proj.weight_scale"][3, 1] = torch.nan
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config = {"model_type": "qwen3_moe", "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_without_a_matrix(model: Path, path: Path) -> Path:
    """Writes the model of tiny_model.py without a matrix of one expert, see `LACKING`."""
    shutil.copytree(model, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.{LAYERS - 1}.mlp.experts.1.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    return path
