"""A tiny Qwen3-MoE whose experts, and nothing else, are quantised, as published models are.

The settings in config.json are those that quantisers write for such a model, so that the engines
choose their own methods for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from expert_weights import HIDDEN, INTERMEDIATE, Weights
from safetensors.torch import load_file, save_file
from safetensors_files import FORMATS, SYMMETRIC_GPTQ, Format, expert_tensors
from tiny_model import LAYERS, Reference, make

from kt_kernel.conversion import Request, convert, make_plan
from kt_kernel.testing import int4_settings, quantise_weights

SIZES = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "head_dim": 64}  # 64: for SGLang's kernels
_DENSE = ["lm_head"] + [
    f"model.layers.{layer}.{module}"
    for layer in range(LAYERS)
    for module in (
        *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "qkv")),
        "mlp.gate",
    )
]


def _compressed_tensors(form: str, inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": _DENSE,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


_GPTQ_DENSE = {f"-:.*{name}.*": {} for name in ("self_attn", r"mlp\.gate$")}
# By name in `SERVED`, more than the readers need.
SETTINGS: dict[str, dict[str, Any]] = {
    "FP8": {"activation_scheme": "dynamic", "modules_to_not_convert": _DENSE},
    "FP8_PERCHANNEL": _compressed_tensors(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
        **{"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    ),
    "RAWINT4": int4_settings(_DENSE),
    "GPTQ_INT4": {"dynamic": _GPTQ_DENSE},
    "AWQ_INT4": {"modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate"]},
    "NVFP4": {"quant_algo": "NVFP4", "group_size": 16, "ignore": _DENSE},
    "MXFP8": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": _DENSE},
    "W8A8": _compressed_tensors(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
        **{"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    ),
}

SERVED: dict[str, Format] = FORMATS | {
    "GPTQ_INT4": SYMMETRIC_GPTQ,
    "W8A8": FORMATS["int8 per row"],
}


PLAIN, PLAIN_METHOD = "unquantised", "INT4_G32"  # a model of 16 bits, and what auto makes of it


@dataclass(frozen=True)
class Served:
    """A model served with some hot experts, stored on the device as --kt-hot-format ``form``.

    cold_packed: its cold experts come from a packed directory. streamed: tokens from which batches
    stream them to the GPU; 0: by default.
    """

    model: str
    hot: int = 0
    form: str = "auto"
    cold_packed: bool = False
    streamed: int = 0

    @property
    def name(self) -> str:
        cold = ", cold packed" * self.cold_packed + ", streamed" * bool(self.streamed)
        return f"{self.model}, {self.hot} hot ({self.form}){cold}"

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_gpu_experts": self.hot}
        if self.streamed:
            options["gpu_prefill_token_threshold"] = self.streamed
        return options | ({"hot_format": self.form} if self.form != "auto" else {})

    @property
    def method(self) -> str:
        """Of its cold experts."""
        return PLAIN_METHOD if self.model == PLAIN else SERVED[self.model].method


def make_quantised(path: Path, name: str) -> Weights:
    """Writes the model to a new folder. Returns the values of its experts' weights; of the
    unquantised model, those in `PLAIN_METHOD`."""
    form = FORMATS["BF16"] if name == PLAIN else SERVED[name]
    make(path, **SIZES)
    tensors = load_file(path / "model.safetensors")
    others = {name: t for name, t in tensors.items() if ".experts." not in name}
    experts, weights = expert_tensors(form)
    save_file(others | experts, path / "model.safetensors", {"format": "pt"})
    if name == PLAIN:
        return [
            [tuple(quantise_weights(PLAIN_METHOD, w.bfloat16()) for w in one) for one in layer]
            for layer in weights
        ]
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = (form.quantization or {}) | SETTINGS[name]
    (path / "config.json").write_text(json.dumps(config))
    return weights


def pack(path: Path) -> str:
    """Packs the experts of the unquantised model beside it, once; returns the directory."""
    packed = path.with_name(f"{path.name} packed")
    if not packed.exists():
        convert(make_plan(Request(str(path), str(packed), PLAIN_METHOD, scale_search=False)))
    return str(packed)


def put(reference: Reference, weights: Weights) -> None:
    """Gives the reference these weights of experts."""
    for (gate_up, down), experts in zip(reference.stacks(), weights, strict=True):
        for expert, (gate, up, wanted_down) in enumerate(experts):
            gate_up[expert] = torch.cat([gate, up])
            down[expert] = wanted_down
