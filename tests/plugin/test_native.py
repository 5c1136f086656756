"""A model in FP8 served as one on a GPU: the engine's own kernels for the hot experts, ours for the
cold ones, both from the same checkpoint, which is named once.

KT_VLLM_GPU_PYTHON and KT_SGLANG_GPU_PYTHON name pythons with engines for CUDA, and this package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    TIMEOUT,
    check_logprobs,
    environment,
    gpu_python,
    run,
)
from expert_weights import Weights
from quantised_models import SIZES, make_quantised, put
from tiny_model import EXPERTS, Reference, make, spread_prompts

STEPS = 8
PROMPTS = spread_prompts(4)
HOT = [0, 3, EXPERTS]
pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def quantised(folder: Path) -> tuple[Path, Weights]:
    """The model, and its experts' weights."""
    return folder / "model", make_quantised(folder / "model", "FP8")


@pytest.fixture(scope="module")
def expected(folder: Path, quantised: tuple[Path, Weights]) -> Reference:
    """transformers in float32 with the dequantised weights."""
    reference = Reference(make(folder / "plain", **SIZES))
    put(reference, quantised[1])
    return reference


def _check(name: str, answer: dict[str, Any], expected: Reference) -> None:
    """bfloat16 activations, in the hot experts' kernels FP8 ones."""
    check_logprobs(name, answer, expected, PROMPTS, median=0.05, mean=0.1)


def test_vllm(folder: Path, quantised: tuple[Path, Weights], expected: Reference) -> None:
    path = str(quantised[0])
    runs = [
        {"name": f"{hot} hot", "engine": GPU_VLLM, "compile": True, "kt": {"num_gpu_experts": hot}}
        for hot in HOT
    ]
    job = {"model": path, "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS, "runs": runs}
    python = gpu_python("KT_VLLM_GPU_PYTHON")
    for name, answer in run(python, "vllm_run.py", folder / "vllm", environment(), **job).items():
        _check(f"vLLM {name}", answer, expected)


def test_sglang(folder: Path, quantised: tuple[Path, Weights], expected: Reference) -> None:
    path = str(quantised[0])
    runs = [{"name": f"{hot} hot", "config": json.dumps({"num_gpu_experts": hot})} for hot in HOT]
    job = {
        "model": path,
        "dtype": "bfloat16",
        "device": GPU_SGLANG,
        "prompts": PROMPTS,
        "steps": STEPS,
        "runs": runs,
    }
    python = gpu_python("KT_SGLANG_GPU_PYTHON")
    for name, answer in run(
        python, "sglang_run.py", folder / "sglang", environment(), **job
    ).items():
        _check(f"SGLang {name}", answer, expected)
