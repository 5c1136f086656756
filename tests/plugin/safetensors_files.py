"""Checkpoints of a tiny Qwen3-MoE's experts in the formats of safetensors files.

The weights are random numbers of each format, so that nothing needs to quantise. Their values come
from the formats' own libraries and definitions, as in the tests of the readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import test_awq
import test_fp8
import test_gptq
import test_int4
import test_int8
import test_mxfp4
import test_mxfp8
import test_nvfp4
import torch
from expert_weights import MATRICES, SPREAD, Source, Weights, bf16_matrix
from quantised_files import PROJECTIONS, Tensors, save
from test_stacks import fp8_blocks
from tiny_model import EXPERTS, LAYERS


@dataclass(frozen=True)
class Format:
    """method: the --kt-method. make: random parts of a matrix [rows, columns]. values: the float64
    values of parts. quantization: the settings in config.json."""

    method: str
    make: Callable[[int, int], Tensors]
    values: Callable[[Tensors], torch.Tensor]
    quantization: dict[str, Any] | None = None


def _scaled(make: Callable[[int, int], Tensors], part: str, values: Callable) -> Callable:
    """`make` with floating-point scales that give the weights the wanted spread."""

    def scaled(rows: int, columns: int) -> Tensors:
        parts = make(rows, columns)
        factor = SPREAD / float(values(dict(parts)).std())
        return {n: (t * factor).to(t.dtype) if n == part else t for n, t in parts.items()}

    return scaled


def _ue8m0(make: Callable[[int, int], Tensors], part: str, low: int) -> Callable:
    """`make` with ue8m0 scales from 2^(low - 127) to twice that."""

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
        lambda rows, columns: {"weight": bf16_matrix(rows, columns)},
        lambda parts: parts["weight"].double(),
    ),
    "FP8": _format(
        "FP8",
        test_fp8.block("weight_scale_inv"),
        "weight_scale_inv",
        test_fp8.block_reference,
        test_fp8.DEEPSEEK,
    ),
    "FP8_PERCHANNEL": _format(
        "FP8_PERCHANNEL",
        test_fp8.per_row(()),
        "weight_scale",
        lambda parts: parts["weight"].double() * parts["weight_scale"].double()[:, None],
        {"quant_method": "compressed-tensors"},
    ),
    "RAWINT4": _format(
        "RAWINT4", test_int4.make_with(), "weight_scale", test_int4.reference, test_int4.config()
    ),
    "RAWINT4 with zero points": _format(
        "RAWINT4",
        test_int4.make_with(zero=True),
        "weight_scale",
        test_int4.reference,
        test_int4.config(symmetric=False),
    ),
    "GPTQ_INT4": _format(
        "GPTQ_INT4",
        test_gptq.make_with(),
        "scales",
        test_gptq.reference(1),
        test_gptq.config(sym=False),
    ),
    "GPTQ_INT4 in order of activations": _format(
        "GPTQ_INT4",
        test_gptq.make_with(order=test_gptq.shuffled),
        "scales",
        test_gptq.reference(1),
        test_gptq.config(sym=False, desc_act=True),
    ),
    "AWQ_INT4": _format(
        "AWQ_INT4", test_awq.make_with(), "scales", test_awq.reference, test_awq.config()
    ),
    "MXFP4": Format(
        "MXFP4",
        _ue8m0(test_mxfp4.compressed, "weight_scale", 121),
        lambda parts: test_mxfp4.dequantise(parts["weight_packed"], parts["weight_scale"]).double(),
        {"quant_method": "compressed-tensors"},
    ),
    "MXFP8": Format(
        "MXFP8",
        _ue8m0(test_mxfp8.make_with("weight_scale"), "weight_scale", 116),
        test_mxfp8.reference,
        {"quant_method": "mxfp8"},
    ),
    "NVFP4": _format(
        "NVFP4",
        test_nvfp4.MODELOPT,
        "weight_scale_2",
        test_nvfp4.modelopt_values,
        {"quant_method": "modelopt"},
    ),
    "int8 per row": _format(
        "AMXINT8",
        test_int8.w8a8(),
        "weight_scale",
        test_int8.scaled,
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
    ),
}

# For engines that serve no other GPTQ.
SYMMETRIC_GPTQ = _format(
    "GPTQ_INT4",
    test_gptq.make_with(zero=7),
    "scales",
    test_gptq.reference(1),
    test_gptq.config(),
)

_FOUR_BITS = _format("GPTQ_INT4", test_gptq.make_with(zero=7), "scales", test_gptq.reference(1))
_EIGHT_BITS = _format("MIXED", test_int8.gptq8, "scales", test_int8.gptq8_values)


def expert_tensors(form: Format | Callable[[int, str], Format]) -> tuple[Tensors, Weights]:
    """Tensors of all experts with Qwen3-MoE's names, and their weights. form: their format, or a
    function of the layer and "gate", "up" or "down"."""
    torch.manual_seed(7)
    tensors: Tensors = {}
    weights: Weights = []
    for layer in range(LAYERS):
        weights.append([])
        for expert in range(EXPERTS):
            start = f"model.layers.{layer}.mlp.experts.{expert}."
            values = []
            for matrix, shape in MATRICES.items():
                own = form if isinstance(form, Format) else form(layer, matrix)
                parts = own.make(*shape)
                values.append(own.values(dict(parts)))
                tensors |= {f"{start}{PROJECTIONS[matrix]}.{n}": t for n, t in parts.items()}
            weights[-1].append(tuple(values))
    return tensors, weights


def _write(form: Format, path: Path) -> Weights:
    tensors, weights = expert_tensors(form)
    save(path, tensors, form.quantization)
    return weights


def _write_mixed(path: Path) -> Weights:
    """GPTQ that leaves the first layer alone and has 8 bits in down."""

    def form_of(layer: int, matrix: str) -> Format:
        if layer == 0:
            return FORMATS["BF16"]
        return _EIGHT_BITS if matrix == "down" else _FOUR_BITS

    tensors, weights = expert_tensors(form_of)
    save(path, tensors, test_gptq.config(dynamic={"+:.*down_proj": {"bits": 8}}))
    return weights


def _write_stacks(path: Path) -> Weights:
    """FP8 in blocks, with the experts of a layer in one tensor, as in transformers."""
    torch.manual_seed(7)
    tensors: Tensors = {}
    weights: Weights = []
    for layer in range(LAYERS):
        start = f"model.layers.{layer}.mlp.experts."
        stacks: list[torch.Tensor] = []
        for name, matrices in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            rows, columns = MATRICES[matrices[0]]
            parts, values = fp8_blocks(len(matrices) * rows, columns, len(matrices), EXPERTS)
            factor = 2.0 ** round(math.log2(SPREAD / float(values.std())))  # exact
            parts["_scale_inv"] *= factor
            stacks += (values * factor).chunk(len(matrices), 1)
            tensors |= {f"{start}{name}{end}": tensor for end, tensor in parts.items()}
        weights.append(list(zip(*stacks, strict=True)))
    save(path, tensors, model_type="qwen3_5_moe")
    return weights


SOURCES: dict[str, Source] = {
    **{name: Source(form.method, partial(_write, form)) for name, form in FORMATS.items()},
    "FP8 in stacks": Source("FP8", _write_stacks),
    "formats by layer and matrix": Source("MIXED", _write_mixed),
}
