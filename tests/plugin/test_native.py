"""Quantised models served on a GPU: all experts in our kernels; in FP8 also the engine's own
kernels for hot experts and ours for cold ones, from the same checkpoint, which is named once.

KT_VLLM_GPU_PYTHON and KT_SGLANG_GPU_PYTHON name pythons with engines for CUDA, and this package.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    NO_GRAPHS,
    TIMEOUT,
    Answers,
    check_logprobs,
    environment,
    gpu_python,
    run,
)
from expert_weights import Weights
from quantised_models import SETTINGS, SIZES, make_quantised, put
from tiny_model import EXPERTS, Reference, make, spread_prompts

STEPS = 8
PROMPTS = spread_prompts(4)
RUNS = [("FP8", hot) for hot in (0, 3, EXPERTS)] + [(name, 0) for name in SETTINGS if name != "FP8"]
pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, tuple[Path, Weights]]:
    """The models by format, and their experts' weights."""
    return {name: (folder / name, make_quantised(folder / name, name)) for name in SETTINGS}


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """transformers in float32, whose experts each check sets."""
    return Reference(make(folder / "plain", **SIZES))


def _check(
    engine: str, answers: Answers, models: dict[str, tuple[Path, Weights]], reference: Reference
) -> None:
    """bfloat16 activations, in the hot experts' kernels FP8 ones."""
    failed = []
    for name, hot in RUNS:
        put(reference, models[name][1])
        try:
            run_name = f"{name}, {hot} hot"
            check_logprobs(
                f"{engine} {run_name}", answers[run_name], reference, PROMPTS, median=0.05, mean=0.1
            )
        except AssertionError as error:
            failed.append(f"{name}, {hot} hot: {str(error)[:400]}")
    assert not failed, "\n".join(failed)


def test_vllm(folder: Path, models: dict[str, tuple[Path, Weights]], reference: Reference) -> None:
    runs = [
        {
            "name": f"{name}, {hot} hot",
            "model": str(models[name][0]),
            "engine": GPU_VLLM,
            "compile": name == "FP8",
            "kt": {"num_gpu_experts": hot},
        }
        for name, hot in RUNS
    ]
    job = {"model": "", "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS, "runs": runs}
    python = gpu_python("KT_VLLM_GPU_PYTHON")
    answers = run(python, "vllm_run.py", folder / "vllm", environment(), **job)
    _check("vLLM", answers, models, reference)


def test_sglang(
    folder: Path, models: dict[str, tuple[Path, Weights]], reference: Reference
) -> None:
    runs = [
        {
            "name": f"{name}, {hot} hot",
            "model": str(models[name][0]),
            "config": json.dumps({"num_gpu_experts": hot}),
            "arguments": {} if name == "FP8" else NO_GRAPHS,
        }
        for name, hot in RUNS
    ]
    job = {
        "model": "",
        "dtype": "bfloat16",
        "device": GPU_SGLANG,
        "prompts": PROMPTS,
        "steps": STEPS,
        "runs": runs,
    }
    python = gpu_python("KT_SGLANG_GPU_PYTHON")
    answers = run(python, "sglang_run.py", folder / "sglang", environment(), **job)
    _check("SGLang", answers, models, reference)
