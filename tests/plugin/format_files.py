"""Checkpoints of the experts of a tiny Qwen3-MoE in every format, and what their weights are.

The weights are random in each format's own numbers, so that nothing has to quantise; their values
come from the formats' own libraries and definitions, as in the tests of the readers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

import test_awq
import test_fp8
import test_gptq
import test_int4
import test_mxfp4
import test_mxfp8
import test_nvfp4
from quantised_files import PROJECTIONS, Tensors, save

HIDDEN, INTERMEDIATE = 256, 256  # multiples of the largest block, 256 columns
SPREAD = 0.1  # about the standard deviation of the weights

# Expert weights [layers][experts][gate, up, down], float64.
Weights = list[list[tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class Format:
    """method: the --kt-method. make: random parts of a matrix [rows, columns]. values: what parts
    stand for, float64. quantization: config.json's."""

    method: str
    make: Callable[[int, int], Tensors]
    values: Callable[[Tensors], torch.Tensor]
    quantization: dict[str, Any] | None = None


def _scaled(make: Callable[[int, int], Tensors], part: str, values: Callable) -> Callable:
    """`make` with its floating-point scales such that the weights have the wanted spread."""

    def scaled(rows: int, columns: int) -> Tensors:
        parts = make(rows, columns)
        factor = SPREAD / float(values(dict(parts)).std())
        return {n: (t * factor).to(t.dtype) if n == part else t for n, t in parts.items()}

    return scaled


def _ue8m0(make: Callable[[int, int], Tensors], part: str, low: int) -> Callable:
    """`make` with ue8m0 scales of 2^(low - 127) to twice that."""

    def scaled(rows: int, columns: int) -> Tensors:
        parts = make(rows, columns)
        codes = torch.randint(low, low + 2, parts[part].shape, dtype=torch.uint8)
        return parts | {part: codes.view(parts[part].dtype)}

    return scaled


def _format(method: str, make: Callable, part: str, values: Callable, *more: Any) -> Format:
    return Format(method, _scaled(make, part, values), values, *more)


FORMATS: dict[str, Format] = {
    "BF16": Format(
        "BF16",
        lambda rows, columns: {"weight": (SPREAD * torch.randn(rows, columns)).bfloat16()},
        lambda parts: parts["weight"].double(),
    ),
    "FP8": _format(
        "FP8", test_fp8.block("weight_scale_inv"), "weight_scale_inv", test_fp8.block_reference,
        test_fp8.DEEPSEEK,
    ),
    "FP8_PERCHANNEL": _format(
        "FP8_PERCHANNEL", test_fp8.per_row(()), "weight_scale",
        lambda parts: parts["weight"].double() * parts["weight_scale"].double()[:, None],
        {"quant_method": "compressed-tensors"},
    ),
    "RAWINT4": _format(
        "RAWINT4", test_int4.make_with(), "weight_scale", test_int4.reference, test_int4.config()
    ),
    "GPTQ_INT4": _format(
        "GPTQ_INT4", test_gptq.make_with(), "scales", test_gptq.reference(1),
        test_gptq.config(sym=False),
    ),
    "AWQ_INT4": _format(
        "AWQ_INT4", test_awq.make_with(), "scales", test_awq.reference, test_awq.config()
    ),
    "MXFP4": Format(
        "MXFP4", _ue8m0(test_mxfp4.compressed, "weight_scale", 121),
        lambda parts: test_mxfp4.dequantise(parts["weight_packed"], parts["weight_scale"]).double(),
        {"quant_method": "compressed-tensors"},
    ),
    "MXFP8": Format(
        "MXFP8", _ue8m0(test_mxfp8.make_with("weight_scale"), "weight_scale", 116),
        test_mxfp8.reference, {"quant_method": "mxfp8"},
    ),
    "NVFP4": _format(
        "NVFP4", test_nvfp4.MODELOPT, "weight_scale_2", test_nvfp4.modelopt_values,
        {"quant_method": "modelopt"},
    ),
}  # fmt: skip


def expert_tensors(form: Format, layers: int, experts: int) -> tuple[Tensors, Weights]:
    """Tensors of all experts as Qwen3-MoE names them, and their weights."""
    torch.manual_seed(7)
    shapes = {
        "gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)
    }  # fmt: skip
    tensors: Tensors = {}
    weights: Weights = []
    for layer in range(layers):
        weights.append([])
        for expert in range(experts):
            start = f"model.layers.{layer}.mlp.experts.{expert}."
            values = []
            for matrix, shape in shapes.items():
                parts = form.make(*shape)
                values.append(form.values(dict(parts)))
                tensors |= {f"{start}{PROJECTIONS[matrix]}.{n}": t for n, t in parts.items()}
            weights[-1].append(tuple(values))
    return tensors, weights


def write_safetensors(folder: Path, form: Format, layers: int, experts: int) -> Weights:
    """Writes a checkpoint of the experts alone; returns their weights."""
    tensors, weights = expert_tensors(form, layers, experts)
    save(folder, tensors, form.quantization)
    return weights
