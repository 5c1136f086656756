"""Quantised models served on a GPU: all experts in our kernels, or some of them hot.

KT_VLLM_GPU_PYTHON and KT_SGLANG_GPU_PYTHON name pythons with engines for CUDA, and this package.
The engines of one kind start side by side, because a start takes most of the time.
"""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    HERE,
    NO_GRAPHS,
    TIMEOUT,
    Answers,
    check_logprobs,
    environment,
    gpu_python,
    run,
)
from expert_weights import Weights
from gpt_oss_model import GptOssReference, Stacks, check_experts, make_gpt_oss
from quantised_models import PLAIN, SETTINGS, SIZES, Served, make_quantised, put
from tiny_model import EXPERTS, Reference, make, spread_prompts

STEPS = 8
PROMPTS = spread_prompts(4, vocabulary=128)  # gpt-oss' vocabulary is the smallest one
SIDE_BY_SIDE = {"vllm": 4, "sglang": 5}  # processes
GPT_OSS = "gpt-oss"
GPT_OSS_RUNS = [
    Served(GPT_OSS),
    Served(GPT_OSS, 2),
    Served(GPT_OSS, streamed=8),
    Served(GPT_OSS, 2, streamed=8),
]
# By default, hot experts of RAWINT4, GPTQ_INT4, AWQ_INT4 and W8A8 are packed, FP8 is the engine's.
VLLM = [
    *(Served(name, 3) for name in SETTINGS),
    *map(Served, SETTINGS),
    Served("FP8", EXPERTS),
    Served("FP8", 3, "bf16"),
    Served("AWQ_INT4", EXPERTS),
    Served("RAWINT4", 3, "bf16"),
    Served(PLAIN, 3, "packed"),
    *GPT_OSS_RUNS,
]
# SGLang 0.5.17 serves AWQ in float16 only.
SGLANG = [
    Served("FP8", 3),
    Served("RAWINT4", 3),
    Served(PLAIN, 3, "packed"),
    *(Served(name, 3) for name in ("GPTQ_INT4", "NVFP4", "MXFP8", "W8A8", "FP8_PERCHANNEL")),
    Served("RAWINT4"),
    Served("RAWINT4", EXPERTS),
    *GPT_OSS_RUNS,
]
GRAPHS = {Served("FP8", 3), Served("RAWINT4", 3), Served(PLAIN, 3, "packed")}  # captured
pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, tuple[Path, Weights]]:
    """The models by format, and their experts' weights."""
    return {
        name: (folder / name, make_quantised(folder / name, name)) for name in (*SETTINGS, PLAIN)
    }


@pytest.fixture(scope="module")
def gpt_oss(folder: Path) -> tuple[Path, Stacks]:
    return folder / GPT_OSS, make_gpt_oss(folder / GPT_OSS)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """transformers in float32, whose experts each check sets."""
    return Reference(make(folder / "plain", **SIZES))


def _options(one: Served) -> dict[str, Any]:
    return one.options | {"cpuinfer": 1}


def _run_all(engine: str, folder: Path, runs: list[dict[str, Any]], **job: Any) -> Answers:
    """Runs as `run`, in several processes."""
    job |= {"model": "", "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS}
    python, count = gpu_python(f"KT_{engine.upper()}_GPU_PYTHON"), SIDE_BY_SIDE[engine]

    def run_some(number: int) -> Answers:
        part = runs[number::count]
        script, place = f"{engine}_run.py", folder / str(number)
        return run(python, script, place, environment(OMP_NUM_THREADS="1"), runs=part, **job)

    folder.mkdir()
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(run_some, range(min(count, len(runs)))))
    return {name: answer for some in answers for name, answer in some.items()}


def _check(
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
        answer = answers[one.name]
        try:
            check_logprobs(one.name, answer, reference, PROMPTS, median=0.05, mean=0.1)
        except AssertionError as error:
            failed.append(f"{one.name}: {str(error)[:400]}")
    assert not failed, "\n".join(failed)


def _check_gpt_oss(served: list[Served], answers: Answers, reference: GptOssReference) -> None:
    for one in served:
        if one.model != GPT_OSS:
            continue
        answer = answers[one.name]
        check_experts(one.name, answer, reference, PROMPTS)
        stats = answer["stats"]
        first = (stats["models"] if isinstance(stats, dict) else stats)[0]
        assert (first.get("streamed_batches", 0) > 0) == (one.streamed > 0), one.name


def _path(one: Served, models: dict[str, tuple[Path, Weights]], gpt_oss: Path) -> str:
    return str(gpt_oss if one.model == GPT_OSS else models[one.model][0])


def test_vllm(
    folder: Path,
    models: dict[str, tuple[Path, Weights]],
    gpt_oss: tuple[Path, Stacks],
    reference: Reference,
) -> None:
    runs = [
        {
            "name": one.name,
            "model": _path(one, models, gpt_oss[0]),
            "engine": GPU_VLLM,
            "compile": one in GRAPHS,
            "kt": _options(one),
        }
        for one in VLLM
    ]
    answers = _run_all("vllm", folder / "vllm", runs)
    _check(VLLM, answers, models, reference)
    _check_gpt_oss(VLLM, answers, GptOssReference(folder / "vllm gpt-oss", gpt_oss[1]))


def test_sglang(
    folder: Path,
    models: dict[str, tuple[Path, Weights]],
    gpt_oss: tuple[Path, Stacks],
    reference: Reference,
) -> None:
    runs = [
        {
            "name": one.name,
            "model": _path(one, models, gpt_oss[0]),
            "config": json.dumps(_options(one)),
            # Other ports for engines that start at the same time.
            "arguments": {"port": 31000 + 500 * number}
            | ({} if one in GRAPHS else NO_GRAPHS)
            # SGLang selects kernels by itself, and kt-moe Triton's in their place.
            | ({"moe_runner_backend": "auto"} if one.model == GPT_OSS else {}),
        }
        for number, one in enumerate(SGLANG)
    ]
    answers = _run_all("sglang", folder / "sglang", runs, device=GPU_SGLANG)
    _check(SGLANG, answers, models, reference)
    _check_gpt_oss(SGLANG, answers, GptOssReference(folder / "sglang gpt-oss", gpt_oss[1]))


def test_products_in_vllm(folder: Path) -> None:
    """The rows of packed hot experts, against float64. Weights are rounded to bfloat16 before
    they are multiplied, and so are the activations."""
    python, result = gpu_python("KT_VLLM_GPU_PYTHON"), folder / "products.json"
    command = [python, HERE / "vllm_packed_products.py", str(result)]
    subprocess.run(command, check=True, env=environment(), timeout=TIMEOUT)
    errors = json.loads(result.read_text())["errors"]
    assert len(errors) == 27 and max(errors.values()) < 0.02, errors
