"""Experts that were packed before serving, by kt-moe's converter and in the form of kt-kernel's.
They come from BF16 weights that differ from those of the served model."""

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

PARTS = 2  # NUMA nodes for which kt-kernel splits the weights
Part = tuple[np.ndarray, np.ndarray]  # codes and scales


def _convert(method: str, path: Path) -> Weights:
    source = path.with_name(f"{path.name} source")
    weights = SAFETENSORS["BF16"].write(source)
    # The oracle's rounding does not search scales.
    convert(make_plan(Request(str(source), str(path), method, scale_search=False)))
    return [
        [tuple(quantise_weights(method, matrix.float()) for matrix in expert) for expert in layer]
        for layer in weights
    ]


def _kt_parts(weights: torch.Tensor, bits: int, axis: int) -> tuple[list[Part], torch.Tensor]:
    """kt-kernel's parts of a matrix, and their values. For int8 columns in several parts, the
    reader rounds the codes once more, which is less than the error from activations."""
    parts = [quantise(part, bits) for part in np.split(weights.float().numpy(), PARTS, axis)]
    step = 1 if bits == 8 else 16
    values = [codes * (step * scale.astype(np.float64))[:, None] for codes, scale in parts]
    return parts, torch.from_numpy(np.concatenate(values, axis))


def _kt_kernel(bits: int, path: Path) -> Weights:
    torch.manual_seed(7)
    tensors: dict[str, np.ndarray] = {}
    weights: Weights = []
    for layer in range(LAYERS):
        weights.append([])
        for expert in range(EXPERTS):
            values = {}
            for matrix, shape in MATRICES.items():
                parts, values[matrix] = _kt_parts(bf16_matrix(*shape), bits, int(matrix == "down"))
                for number, (codes, scale) in enumerate(parts):
                    name = f"blk.{layer}.ffn_{matrix}_exps.{expert}.numa.{number}"
                    tensors[f"{name}.weight"] = to_bytes(codes, bits)
                    tensors[f"{name}.scale"] = scale
            weights[-1].append(tuple(values.values()))
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
