"""Quantised models served by both engines on the CPU with no expert hot: the experts are read from
the served model, in formats for which the engines have no kernel on this device.

Log-probabilities are those of transformers in float32 with the dequantised weights. As a control,
they are far from those with each expert in the place of the one before it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_sglang
import test_vllm
import torch
from engines import TIMEOUT, Answers, check_refused
from expert_weights import Weights
from gpt_oss_model import GptOssReference, Stacks, make_gpt_oss
from quantised_models import SERVED as FORMATS
from quantised_models import SETTINGS, SIZES, make_quantised, put
from repositories import keep
from tiny_model import LAYERS, TOP_K, Reference, computed_tokens, make, spread_prompts

STEPS = 8
PROMPTS = spread_prompts(4, vocabulary=128)  # gpt-oss' vocabulary is the smallest one
CACHED, REPOSITORY = "FP8", "kt-moe/served"  # the model that is named as a repository
# SGLang starts too slowly for more. Its AWQ has no bfloat16, and its GPTQ on the CPU needs AMX.
SERVED = {"vllm": list(SETTINGS), "sglang": ["FP8", "RAWINT4", "NVFP4"]}
HOT = "AWQ_INT4"  # with hot experts, which need an engine's kernel
GPT_OSS = "gpt-oss"
RUNS = [(engine, name) for engine, names in SERVED.items() for name in names]

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def models(folder: Path) -> Callable[[str], tuple[Path, Weights]]:
    """A model and its experts' weights, written when it is first asked for."""
    found: dict[str, tuple[Path, Weights]] = {}

    def of(name: str) -> tuple[Path, Weights]:
        if name not in found:
            found[name] = folder / name, make_quantised(folder / name, name)
        return found[name]

    return of


@pytest.fixture(scope="module")
def gpt_oss(folder: Path) -> tuple[Path, Stacks]:
    return folder / GPT_OSS, make_gpt_oss(folder / GPT_OSS)


@pytest.fixture(scope="module")
def answers(
    folder: Path,
    models: Callable[[str], tuple[Path, Weights]],
    gpt_oss: tuple[Path, Stacks],
) -> Callable[[str], Answers]:
    """Of an engine; it runs when it is first asked for."""
    found: dict[str, Answers] = {}
    cache = folder / "cache"
    keep(cache, REPOSITORY, models(CACHED)[0])

    def of(engine: str) -> Answers:
        if os.environ.get(f"KT_{engine.upper()}_PYTHON") is None:
            pytest.skip(f"KT_{engine.upper()}_PYTHON is not set (make test sets it)")
        if engine not in found:
            module = {"vllm": test_vllm, "sglang": test_sglang}[engine]
            env = module.environment(HF_HUB_CACHE=str(cache), TORCHDYNAMO_DISABLE="1")
            found[engine] = module.run(folder / engine, env, **_job(engine, models, gpt_oss[0]))
        return found[engine]

    return of


def _job(
    engine: str, models: Callable[[str], tuple[Path, Weights]], gpt_oss: Path
) -> dict[str, Any]:
    runs = []
    for name, hot in [*((name, 0) for name in SERVED[engine]), (HOT, 1)]:
        path = REPOSITORY if name == CACHED else str(models(name)[0])
        options = {"num_gpu_experts": hot}
        if engine == "vllm":
            more: dict[str, Any] = {"kt": options}
        else:
            more = {"config": json.dumps(options)}
        runs.append({"name": f"{name}, {hot} hot", "model": path} | more)
    if engine == "vllm":
        options = {"kt": {"num_gpu_experts": 0, "allow_untested": True}}
        runs.append({"name": GPT_OSS, "model": str(gpt_oss)} | options)
    job = {"model": "", "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS, "runs": runs}
    return job | ({"inspect_here": True} if engine == "vllm" else {"fork": True})


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """transformers, whose experts each test sets."""
    return Reference(make(folder / "plain", **SIZES))


@pytest.mark.parametrize(("engine", "name"), RUNS)
def test_logprobs_are_those_of_transformers(
    engine: str,
    name: str,
    answers: Callable[[str], Answers],
    models: Callable[[str], tuple[Path, Weights]],
    reference: Reference,
) -> None:
    """The engines compute in bfloat16, the reference in float32."""
    answer = answers(engine)[f"{name}, 0 hot"]
    assert "error" not in answer, answer
    found = torch.tensor(answer["logprobs"]).flatten()
    put(reference, models(name)[1])
    near = (reference.logprobs(PROMPTS, answer["tokens"]) - found).abs()
    put(reference, [[*experts[1:], experts[0]] for experts in models(name)[1]])
    far = (reference.logprobs(PROMPTS, answer["tokens"]) - found).abs()
    print(
        f"{engine} {name}: median {near.median():.4f} mean {near.mean():.4f} far {far.mean():.3f}"
    )
    assert near.median() < 0.05 and near.mean() < 0.1, (near.median(), near.mean())
    assert far.mean() > 10 * near.mean(), (far.mean(), near.mean())
    stats = answer["stats"] if engine == "vllm" else answer["stats"]["models"]
    calls = sum(layer["expert_calls"] for layer in stats)
    assert calls >= LAYERS * TOP_K * computed_tokens(PROMPTS, STEPS)  # all of them in our kernels
    described = answer["describe"][0] if engine == "vllm" else stats[0]["description"]
    assert f" {FORMATS[name].method}, " in described


@pytest.mark.parametrize("engine", SERVED)
def test_hot_experts_are_refused(engine: str, answers: Callable[[str], Answers]) -> None:
    check_refused(
        answers(engine)[f"{HOT}, 1 hot"], "--kt-num-gpu-experts 1: the model is quantised"
    )


def test_gpt_oss(
    folder: Path, answers: Callable[[str], Answers], gpt_oss: tuple[Path, Stacks]
) -> None:
    """MXFP4 with biases, a SwiGLU limit and an alpha."""
    answer = answers("vllm")[GPT_OSS]
    assert "error" not in answer, answer
    reference = GptOssReference(folder / "gpt-oss plain", gpt_oss[1])
    found = torch.tensor(answer["logprobs"]).flatten()
    distances = []
    for offset in (0, 1):
        reference.put(offset)
        distances.append((reference.logprobs(PROMPTS, answer["tokens"]) - found).abs())
    near, far = distances
    print(f"gpt-oss: {near.median():.4f} {near.mean():.4f}, control {far.mean():.3f}")
    assert near.median() < 0.05 and near.mean() < 0.1, (near.median(), near.mean())
    assert far.mean() > 10 * near.mean(), (far.mean(), near.mean())
    assert " MXFP4, " in answer["describe"][0]
