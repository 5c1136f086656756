"""Quantised models served on a GPU: all experts in our kernels, or some of them hot.

KT_VLLM_GPU_PYTHON and KT_SGLANG_GPU_PYTHON name pythons with engines for CUDA, and this package.
The engines of one kind start side by side, because a start takes most of the time.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
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
from gpt_oss_model import GptOssReference, Stacks, make_gpt_oss
from quantised_models import SETTINGS, SIZES, make_quantised, put
from tiny_model import EXPERTS, Reference, make, spread_prompts

STEPS = 8
PROMPTS = spread_prompts(4, vocabulary=128)  # gpt-oss' vocabulary is the smallest one
SIDE_BY_SIDE = 6  # engines
GPT_OSS = "gpt-oss"
pytestmark = pytest.mark.timeout(TIMEOUT)


@dataclass(frozen=True)
class Served:
    """A model and its options. graphs: with torch.compile or CUDA graphs."""

    model: str
    hot: int = 0
    graphs: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}, {self.hot} hot"

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_gpu_experts": self.hot, "cpuinfer": 2}
        return options | ({"allow_untested": True} if self.model == GPT_OSS else {})


FP8 = [Served("FP8", hot, graphs=True) for hot in (0, 3, EXPERTS)]
VLLM = [*FP8, *(Served(name) for name in SETTINGS if name != "FP8"), Served(GPT_OSS)]
# SGLang 0.5.17 serves AWQ in float16 only.
SGLANG = [*FP8, *(Served(name) for name in SETTINGS if name not in ("FP8", "AWQ_INT4"))]


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, tuple[Path, Weights]]:
    """The models by format, and their experts' weights."""
    return {name: (folder / name, make_quantised(folder / name, name)) for name in SETTINGS}


@pytest.fixture(scope="module")
def gpt_oss(folder: Path) -> tuple[Path, Stacks]:
    return folder / GPT_OSS, make_gpt_oss(folder / GPT_OSS)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """transformers in float32, whose experts each check sets."""
    return Reference(make(folder / "plain", **SIZES))


def _run_all(
    python: str, script: str, folder: Path, runs: list[dict[str, Any]], **job: Any
) -> Answers:
    """Runs as `run`, in several processes."""
    job |= {"model": "", "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS}

    def run_some(number: int) -> Answers:
        part = runs[number::SIDE_BY_SIDE]
        return run(python, script, folder / str(number), environment(), runs=part, **job)

    folder.mkdir()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        answers = list(pool.map(run_some, range(min(SIDE_BY_SIDE, len(runs)))))
    return {name: answer for some in answers for name, answer in some.items()}


def _check(
    engine: str,
    served: list[Served],
    answers: Answers,
    models: dict[str, tuple[Path, Weights]],
    reference: Reference,
) -> None:
    """bfloat16 activations, in the engines' kernels for FP8 experts FP8 ones."""
    failed = []
    for one in served:
        if one.model == GPT_OSS:
            continue
        put(reference, models[one.model][1])
        try:
            check_logprobs(
                f"{engine} {one.name}",
                answers[one.name],
                reference,
                PROMPTS,
                median=0.05,
                mean=0.1,
            )
        except AssertionError as error:
            failed.append(f"{one.name}: {str(error)[:400]}")
    assert not failed, "\n".join(failed)


def _check_gpt_oss(
    folder: Path, engine: str, served: list[Served], answers: Answers, stacks: Stacks
) -> None:
    """As a control, each expert has the weights of another one."""
    reference = GptOssReference(folder / "gpt-oss plain", stacks)
    for one in served:
        if one.model != GPT_OSS:
            continue
        answer = answers[one.name]
        assert "error" not in answer, answer
        found = torch.tensor(answer["logprobs"]).flatten()
        distances = []
        for offset in (0, 1):
            reference.put(offset)
            distances.append((reference.logprobs(PROMPTS, answer["tokens"]) - found).abs())
        near, far = distances
        print(f"{engine} {one.name}: {near.median():.4f} {near.mean():.4f} far {far.mean():.3f}")
        assert near.median() < 0.05 and near.mean() < 0.1, (near.median(), near.mean())
        assert far.mean() > 10 * near.mean(), (far.mean(), near.mean())


def test_vllm(
    folder: Path,
    models: dict[str, tuple[Path, Weights]],
    gpt_oss: tuple[Path, Stacks],
    reference: Reference,
) -> None:
    python = gpu_python("KT_VLLM_GPU_PYTHON")
    runs = [
        {
            "name": one.name,
            "model": str(gpt_oss[0] if one.model == GPT_OSS else models[one.model][0]),
            "engine": GPU_VLLM,
            "compile": one.graphs,
            "kt": one.options,
        }
        for one in VLLM
    ]
    answers = _run_all(python, "vllm_run.py", folder / "vllm", runs)
    _check("vLLM", VLLM, answers, models, reference)
    _check_gpt_oss(folder, "vLLM", VLLM, answers, gpt_oss[1])


def test_sglang(
    folder: Path, models: dict[str, tuple[Path, Weights]], reference: Reference
) -> None:
    python = gpu_python("KT_SGLANG_GPU_PYTHON")
    runs = [
        {
            "name": one.name,
            "model": str(models[one.model][0]),
            "config": json.dumps(one.options),
            # Other ports for engines that start at the same time.
            "arguments": {"port": 31000 + 500 * number} | ({} if one.graphs else NO_GRAPHS),
        }
        for number, one in enumerate(SGLANG)
    ]
    answers = _run_all(python, "sglang_run.py", folder / "sglang", runs, device=GPU_SGLANG)
    _check("SGLang", SGLANG, answers, models, reference)
