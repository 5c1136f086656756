"""Quantised models served by both engines on the CPU: the experts are read from the served model,
in formats for which the engines have no kernel on this device. Hot ones have 16 bits, or are
packed, with the engines' GPU kernels emulated.

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
from class_results import OTHER_PLACES, PLAIN_EXPERTS
from class_results import keep as keep_result
from engines import TIMEOUT, Answers, check_refused
from expert_weights import Weights
from families_2026 import CPU_MLA
from gpt_oss_model import GptOssReference, Stacks, check_experts, make_gpt_oss
from kimi_model import KimiReference, make_kimi
from quantised_models import PLAIN, SETTINGS, SIZES, Served, make_quantised, pack, put
from repositories import keep
from tiny_model import EXPERTS, LAYERS, TOP_K, Reference, computed_tokens, make, spread_prompts

STEPS = 8
PROMPTS = spread_prompts(4, vocabulary=128)  # gpt-oss' vocabulary is the smallest one
CACHED, REPOSITORY = "FP8", "kt-moe/served"  # the model that is named as a repository
# SGLang starts too slowly for more. Its AWQ has no bfloat16, and its GPTQ on the CPU needs AMX.
RUNS = {
    "vllm": [
        *map(Served, SETTINGS),
        Served("W8A8", 3),
        Served("NVFP4", EXPERTS),
        Served("AWQ_INT4", 3, "packed"),
        Served("W8A8", 3, "packed"),
        Served("RAWINT4", EXPERTS, "packed"),
        Served(PLAIN, 3, "packed"),
        Served(PLAIN, 3, "packed", cold_packed=True),
    ],
    "sglang": [
        *map(Served, ("FP8", "RAWINT4")),
        Served("NVFP4", 3),
        Served("W8A8", 3, "packed"),
        Served(PLAIN, 3, "packed"),
        Served(PLAIN, 3, "packed", cold_packed=True),
    ],
}
REFUSED = Served("AWQ_INT4", 1, "engine")
GPT_OSS, GPT_OSS_HOT = "gpt-oss", (0, 2)
STAND_INS = {("sglang", GPT_OSS): "attention with sinks"}  # sglang_sinks.py
KIMI = "Kimi-K2"

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
def kimi(folder: Path) -> tuple[Path, Stacks]:
    return folder / KIMI, make_kimi(folder / KIMI)


@pytest.fixture(scope="module")
def answers(
    folder: Path,
    models: Callable[[str], tuple[Path, Weights]],
    gpt_oss: tuple[Path, Stacks],
    kimi: tuple[Path, Stacks],
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
            found[engine] = module.run(
                folder / engine, env, **_job(engine, models, gpt_oss[0], kimi[0])
            )
        return found[engine]

    return of


def _kt(engine: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options in a run of vllm_run.py or sglang_run.py."""
    return {"kt": options} if engine == "vllm" else {"config": json.dumps(options)}


def _job(
    engine: str, models: Callable[[str], tuple[Path, Weights]], gpt_oss: Path, kimi: Path
) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for one in (*RUNS[engine], REFUSED):
        path = REPOSITORY if one.model == CACHED else str(models(one.model)[0])
        options = one.options
        if one.cold_packed:
            options["weight_path"] = pack(models(one.model)[0])
        runs.append({"name": one.name, "model": path} | _kt(engine, options))
    if engine == "vllm":
        exact = {"engine": CPU_MLA | {"dtype": "float32"}, "kt": {"num_gpu_experts": 2}}
        runs.append({"name": KIMI, "model": str(kimi)} | exact)
    for hot in GPT_OSS_HOT:
        run: dict[str, Any] = {"name": f"{GPT_OSS}, {hot} hot", "model": str(gpt_oss)}
        run |= {"arguments": {"attention_backend": "intel_amx"}} if engine == "sglang" else {}
        runs.append(run | _kt(engine, {"num_gpu_experts": hot}))
    job = {"model": "", "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS, "runs": runs}
    if engine == "vllm":
        return job | {"modules": ["emulated_packed"], "inspect_here": True}
    return job | {"modules": ["emulated_packed", "sglang_sinks"], "fork": True}


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """transformers, whose experts each test sets."""
    return Reference(make(folder / "plain", **SIZES))


@pytest.mark.parametrize(
    ("engine", "served"),
    [
        pytest.param(engine, one, id=f"{engine}: {one.name}")
        for engine, runs in RUNS.items()
        for one in runs
    ],
)
def test_logprobs_are_those_of_transformers(
    engine: str,
    served: Served,
    answers: Callable[[str], Answers],
    models: Callable[[str], tuple[Path, Weights]],
    reference: Reference,
) -> None:
    """The engines compute in bfloat16, the reference in float32."""
    answer = answers(engine)[served.name]
    assert "error" not in answer, answer
    weights = models(served.model)[1]
    found = torch.tensor(answer["logprobs"]).flatten()
    put(reference, weights)
    near = (reference.logprobs(PROMPTS, answer["tokens"]) - found).abs()
    put(reference, [[*experts[1:], experts[0]] for experts in weights])
    far = (reference.logprobs(PROMPTS, answer["tokens"]) - found).abs()
    print(f"{served.name}: {near.median():.4f} {near.mean():.4f}, control {far.mean():.3f}")
    assert near.median() < 0.05 and near.mean() < 0.1, (near.median(), near.mean())
    assert far.mean() > 10 * near.mean(), (far.mean(), near.mean())
    stats = answer["stats"] if engine == "vllm" else answer["stats"]["models"]
    calls = sum(layer.get("expert_calls", 0) for layer in stats)  # in our kernels
    routes = LAYERS * TOP_K * computed_tokens(PROMPTS, STEPS)
    if served.hot == 0:
        assert calls >= routes
    else:
        assert (calls > 0) == (served.hot < EXPERTS) and calls < 0.9 * routes
    if not served.cold_packed:  # a run of its own in the results has them cold from the model
        _keep(engine, served, near, far)
    assert f" {served.method}, " in _described(engine, answer)


def _described(engine: str, answer: dict[str, Any]) -> str:
    """The first layer, as it describes itself."""
    if engine == "vllm":
        return str(answer["describe"][0])
    return str(answer["stats"]["models"][0]["description"])


def _keep(engine: str, served: Served, near: torch.Tensor, far: torch.Tensor) -> None:
    keep_result(
        engine,
        os.environ[f"KT_{engine.upper()}_PYTHON"],
        "GptOssForCausalLM" if served.model == GPT_OSS else "Qwen3MoeForCausalLM",
        near,
        far,
        experts={PLAIN: PLAIN_EXPERTS, GPT_OSS: "MXFP4 of gpt-oss"}.get(served.model, served.model),
        hot=served.hot,
        of=EXPERTS,
        hot_format="bf16" if served.form == "auto" else served.form,  # what auto is without a GPU
        control=OTHER_PLACES,
        stand_in=STAND_INS.get((engine, served.model)),
    )


@pytest.mark.parametrize("engine", RUNS)
def test_the_engines_kernels_are_refused(engine: str, answers: Callable[[str], Answers]) -> None:
    check_refused(
        answers(engine)[REFUSED.name], "--kt-hot-format engine: the model is quantised with awq"
    )


@pytest.mark.parametrize(
    ("engine", "hot"),
    [  # named as above, or another process would start the engines again
        pytest.param(engine, hot, id=f"{engine}: {hot} hot")
        for engine in RUNS
        for hot in GPT_OSS_HOT
    ],
)
def test_gpt_oss(
    engine: str,
    hot: int,
    folder: Path,
    answers: Callable[[str], Answers],
    gpt_oss: tuple[Path, Stacks],
) -> None:
    """MXFP4 with biases, a SwiGLU limit and an alpha."""
    answer = answers(engine)[f"{GPT_OSS}, {hot} hot"]
    reference = GptOssReference(folder / f"{GPT_OSS} {hot} {engine}", gpt_oss[1])
    near, far = check_experts(f"{GPT_OSS}, {hot} hot", answer, reference, PROMPTS)
    _keep(engine, Served(GPT_OSS, hot), near, far)
    assert " MXFP4, " in _described(engine, answer)


def test_kimi_k2(
    folder: Path, answers: Callable[[str], Answers], kimi: tuple[Path, Stacks]
) -> None:
    """INT4 in DeepSeek-V3's class, some experts hot, in float32."""
    answer = answers("vllm")[KIMI]
    check_experts(KIMI, answer, KimiReference(folder / f"{KIMI} plain", kimi[1]), PROMPTS)
    assert " RAWINT4, " in answer["describe"][0]
