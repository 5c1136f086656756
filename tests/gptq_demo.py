"""The demo model with experts in GPTQ's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import kt_kernel

DEMO_MODEL = Path(kt_kernel.__file__).parent / "demo_model"


def write_gptq(folder: Path, ordered: bool, group: int = 32) -> None:
    """Writes it with random weights. ordered: with act-order. group: -1 for one group per row."""
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if ".experts." not in name:
            continue
        del tensors[name]
        rows, columns = tensor.shape
        size = columns if group < 0 else group
        groups = torch.arange(columns, dtype=torch.int32) // size
        if ordered:
            groups = groups[torch.randperm(columns)]
        random = torch.randint(-(1 << 31), 1 << 31, (columns // 8, rows), dtype=torch.int32)
        start = name.removesuffix("weight")
        tensors[f"{start}qweight"] = random
        tensors[f"{start}scales"] = torch.full((columns // size, rows), 0.01).half()
        tensors[f"{start}qzeros"] = torch.zeros(columns // size, rows // 8, dtype=torch.int32)
        tensors[f"{start}g_idx"] = groups
    save_file(tensors, folder / "model.safetensors")
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True}
    content = json.loads((DEMO_MODEL / "config.json").read_text())
    content["quantization_config"] = quantised | {"desc_act": ordered}
    (folder / "config.json").write_text(json.dumps(content))
