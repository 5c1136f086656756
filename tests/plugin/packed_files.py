"""Experts packed before: by our converter, and as kt-kernel's converter packs them. Both from
BF16 weights that are not those of the served model, and both by rules that are stated twice."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from expert_weights import MATRICES, Source, Weights, bf16_matrix
from kt_writer import quantise, to_bytes
from safetensors.numpy import save_file
from safetensors_files import SOURCES as SAFETENSORS
from tiny_model import EXPERTS, LAYERS

from kt_kernel.conversion import Request, convert, make_plan
from kt_kernel.testing import quantise_weights

PARTS = 2  # NUMA nodes that kt-kernel splits the weights for


def _convert(method: str, path: Path) -> Weights:
    source = path.with_name(f"{path.name} source")
    weights = SAFETENSORS["BF16"].write(source)
    # A searched scale is another than that of the rules of rounding.
    convert(make_plan(Request(str(source), str(path), method, scale_search=False)))
    return [
        [tuple(quantise_weights(method, matrix.float()) for matrix in expert) for expert in layer]
        for layer in weights
    ]


def _kt_kernel(bits: int, path: Path) -> Weights:
    torch.manual_seed(7)
    tensors: dict[str, np.ndarray] = {}
    weights: Weights = []
    for layer in range(LAYERS):
        weights.append([])
        for expert in range(EXPERTS):
            values = []
            for matrix, shape in MATRICES.items():
                split = int(matrix == "down")
                parts = np.split(bf16_matrix(*shape).float().numpy(), PARTS, split)
                stored = [quantise(part, bits) for part in parts]
                for number, (codes, scale) in enumerate(stored):
                    name = f"blk.{layer}.ffn_{matrix}_exps.{expert}.numa.{number}"
                    tensors[f"{name}.weight"] = to_bytes(codes, bits)
                    tensors[f"{name}.scale"] = scale
                step = 1 if bits == 8 else 16
                each = [
                    codes * (step * scale.astype(np.float64))[:, None] for codes, scale in stored
                ]
                values.append(torch.from_numpy(np.concatenate(each, split)))
            weights[-1].append(tuple(values))
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return weights


SOURCES: dict[str, Source] = {
    "packed int8": Source("AMXINT8", partial(_convert, "AMXINT8")),
    "packed int4": Source("AMXINT4", partial(_convert, "AMXINT4")),
    "packed int4 groups": Source("INT4_G32", partial(_convert, "INT4_G32")),
    "int8 of kt-kernel": Source("AMXINT8", partial(_kt_kernel, 8)),
    "int4 of kt-kernel": Source("AMXINT4", partial(_kt_kernel, 4)),
}
