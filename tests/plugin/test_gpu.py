"""The engines on a GPU beside the stock engine; eager, since kt options refuse CUDA graphs so far.

Log-probabilities are compared with those of transformers in float32 on the engine's own text. The
stock engine has everything on the GPU and shows how far bfloat16 alone goes. KT_GPU_RUNS names some
of the runs, separated by commas; all of them take minutes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    HOT,
    NO_GRAPHS,
    TIMEOUT,
    Answers,
    check_logprobs,
    environment,
    gpu_python,
    run,
)
from tiny_model import EXPERTS, VOCABULARY, Reference, make

STEPS = 16
PROMPTS = [[3 + (5 * i * j + i) % (VOCABULARY - 3) for j in range(4 + 7 * i)] for i in range(1, 7)]
# Experts on the GPU; None: the stock engine.
RUNS: dict[str, int | None] = {"stock": None, "some hot": HOT, "none hot": 0, "all hot": EXPERTS}
MEAN = 0.1  # where the stock engine was not run beside ours; it is seen at 0.03 to 0.05

pytestmark = pytest.mark.timeout(TIMEOUT)


def _chosen() -> list[str]:
    names = os.environ.get("KT_GPU_RUNS", ",".join(RUNS)).split(",")
    assert set(names) <= set(RUNS), (names, list(RUNS))
    return names


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return make(folder / "plain", hidden=128, intermediate=128, head_dim=64)  # SGLang's kernels


@pytest.fixture(scope="module")
def transformers(plain: Path) -> Reference:
    return Reference(plain)


def _job(path: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": str(path), "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS,
            "runs": runs}  # fmt: skip


def _judge(engine: str, answers: Answers, reference: Reference) -> None:
    errors = {}
    for name, answer in answers.items():
        assert "error" not in answer, answer
        errors[name] = check_logprobs(f"{engine} {name}", answer, reference, PROMPTS, 0.05, MEAN)
    for name, error in errors.items():
        assert error < 2 * errors.get("stock", MEAN), (name, errors)


def test_vllm(folder: Path, plain: Path, transformers: Reference) -> None:
    python = gpu_python("KT_VLLM_GPU_PYTHON")
    runs = [
        {"name": name, "engine": GPU_VLLM,
         "kt": None if hot is None else {"method": "BF16", "num_gpu_experts": hot}}
        for name, hot in RUNS.items() if name in _chosen()
    ]  # fmt: skip
    job = _job(plain, runs)
    answers = run(python, "vllm_run.py", folder / "vllm", environment(), **job)
    _judge("vLLM", answers, transformers)
    for name, answer in answers.items():
        hot = RUNS[name]
        if hot is not None and hot < EXPERTS:
            assert all(layer["expert_calls"] > 0 for layer in answer["stats"]), answer["stats"]


def test_sglang(folder: Path, plain: Path, transformers: Reference) -> None:
    python = gpu_python("KT_SGLANG_GPU_PYTHON")
    runs = [
        {"name": name, "arguments":
         {} if hot is None else {"kt_method": "BF16", "kt_num_gpu_experts": hot}}
        for name, hot in RUNS.items() if name in _chosen()
    ]  # fmt: skip
    job = _job(plain, runs) | {"device": GPU_SGLANG | NO_GRAPHS}
    answers = run(python, "sglang_run.py", folder / "sglang", environment(), **job)
    _judge("SGLang", answers, transformers)
