"""A model in FP8 served as one on a GPU: the engine's own kernels for the hot experts, ours for the
cold ones, both from the same checkpoint.

KT_VLLM_GPU_PYTHON and KT_SGLANG_GPU_PYTHON name pythons with engines for CUDA, and this package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    TIMEOUT,
    check_logprobs,
    environment,
    gpu_python,
    run,
)
from expert_weights import HIDDEN, INTERMEDIATE, Weights
from safetensors.torch import load_file, save_file
from safetensors_files import FORMATS, expert_tensors
from tiny_model import EXPERTS, LAYERS, Reference, make, spread_prompts

STEPS = 8
PROMPTS = spread_prompts(4)
HOT = [0, 3, EXPERTS]
SIZES = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "head_dim": 64}  # 64: for SGLang's kernels
pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def quantised(folder: Path) -> tuple[Path, Weights]:
    """A model whose experts, and nothing else, are in FP8; their weights."""
    path = make(folder / "model", **SIZES)
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
    return path, weights


@pytest.fixture(scope="module")
def expected(folder: Path, quantised: tuple[Path, Weights]) -> Reference:
    """transformers in float32 with the dequantised weights."""
    reference = Reference(make(folder / "plain", **SIZES))
    for layer, experts in enumerate(quantised[1]):
        module = reference.experts(layer)
        for expert, (gate, up, down) in enumerate(experts):
            module.gate_up_proj.data[expert] = torch.cat([gate, up])
            module.down_proj.data[expert] = down
    return reference


def _check(name: str, answer: dict[str, Any], expected: Reference) -> None:
    """bfloat16 activations, in the hot experts' kernels FP8 ones."""
    check_logprobs(name, answer, expected, PROMPTS, median=0.05, mean=0.1)


def test_vllm(folder: Path, quantised: tuple[Path, Weights], expected: Reference) -> None:
    path = str(quantised[0])
    runs = [
        {"name": f"{hot} hot", "engine": GPU_VLLM, "compile": True,
         "kt": {"method": "FP8", "weight_path": path, "num_gpu_experts": hot}}
        for hot in HOT
    ]  # fmt: skip
    job = {"model": path, "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS, "runs": runs}
    python = gpu_python("KT_VLLM_GPU_PYTHON")
    for name, answer in run(python, "vllm_run.py", folder / "vllm", environment(), **job).items():
        _check(f"vLLM {name}", answer, expected)


def test_sglang(folder: Path, quantised: tuple[Path, Weights], expected: Reference) -> None:
    path = str(quantised[0])
    runs = [
        {"name": f"{hot} hot",
         "arguments": {"kt_method": "FP8", "kt_weight_path": path, "kt_num_gpu_experts": hot}}
        for hot in HOT
    ]  # fmt: skip
    job = {"model": path, "dtype": "bfloat16", "device": GPU_SGLANG, "prompts": PROMPTS,
           "steps": STEPS, "runs": runs}  # fmt: skip
    python = gpu_python("KT_SGLANG_GPU_PYTHON")
    for name, answer in run(
        python, "sglang_run.py", folder / "sglang", environment(), **job
    ).items():
        _check(f"SGLang {name}", answer, expected)
