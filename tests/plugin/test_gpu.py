"""The engines on a GPU beside the stock engine, eagerly and in CUDA graphs.

Log-probabilities are compared with those of transformers in float32 on the engine's own text, and
with the stock engine's own where the texts are still the same. The stock engine has everything on
the GPU, and shows by itself how far bfloat16 goes, and how far its two modes are apart. KT_GPU_RUNS
names some of the runs, separated by semicolons, and KT_GPU_PROCESSES how many go side by side.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deferral import check_deferred
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    HOT,
    NO_GRAPHS,
    SGLANG_COUNTED,
    TIMEOUT,
    Answers,
    check_logprobs,
    environment,
    gpu_python,
    run,
)
from tiny_model import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Reference,
    computed_tokens,
    make,
    spread_prompts,
)


class Kind(NamedTuple):
    """hot: experts on the GPU; None: the stock engine. gpus: of tensor parallelism. streamed:
    tokens from which batches are streamed; 0: never. moving: experts move while serving."""

    hot: int | None
    graphs: bool
    deferred: int = 0
    gpus: int = 1
    streamed: int = 0
    moving: bool = False

    @property
    def mode(self) -> tuple[bool, int]:
        return self.graphs, self.gpus


STEPS = 16
CPU_THREADS = 2  # several engines share the machine
PROMPTS = spread_prompts(6)
# With experts deferred a token's output depends on those beside it: one request, of a size that is
# not padded for a graph. Of a hundred random ones the farthest from ties.
DEFERRED_PROMPT = [226, 160, 49, 55, 14, 77, 95, 247, 5, 137, 82, 28, 108, 95, 161, 23]
KINDS = {"stock": None, "some hot": HOT, "none hot": 0, "all hot": EXPERTS}
RUNS = {
    f"{name}{', graphs' if graphs else ''}": Kind(hot, graphs)
    for graphs in (False, True)
    for name, hot in KINDS.items()
} | {
    "some hot, deferred": Kind(HOT, False, 1),
    "none hot, deferred, graphs": Kind(0, True, 1),
    "some hot, deferred, graphs": Kind(HOT, True, 1),
    "none hot, streamed": Kind(0, False, streamed=16),
    "some hot, streamed": Kind(HOT, False, streamed=16),
    "none hot, streamed, graphs": Kind(0, True, streamed=16),
    "some hot, moving": Kind(HOT, False, moving=True),
    "some hot, moving, graphs": Kind(HOT, True, moving=True),
    "some hot, moving, streamed": Kind(HOT, False, streamed=16, moving=True),
    "stock, graphs, two GPUs": Kind(None, True, gpus=2),
    "some hot, graphs, two GPUs": Kind(HOT, True, gpus=2),
    "none hot, two GPUs": Kind(0, False, gpus=2),
    "some hot, deferred, graphs, two GPUs": Kind(HOT, True, 1, gpus=2),
}
# Mean distance from transformers: that of the stock engine was seen at 0.03 to 0.05. A route that
# rounding turns makes a token's up to 4, which is 0.04 of the mean.
MEAN = 0.15

VLLM_RANKS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
}
# Batches that the engine captures are never streamed.
VLLM_SMALL_GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
SGLANG_SMALL_GRAPHS = {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 8}
SGLANG_RANKS = {"tp_size": 2, "disable_custom_all_reduce": True}

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return make(folder / "plain", hidden=128, intermediate=128, head_dim=64)  # SGLang's kernels


@pytest.fixture(scope="module")
def transformers(plain: Path) -> Reference:
    return Reference(plain)


def _chosen() -> dict[str, Kind]:
    there = [name for name, kind in RUNS.items() if kind.gpus <= torch.cuda.device_count()]
    names = os.environ.get("KT_GPU_RUNS", ";".join(there)).split(";")
    return {name: RUNS[name] for name in names}


def _answers(
    python: str, script: str, folder: Path, runs: list[dict[str, Any]], job: dict[str, Any]
) -> Answers:
    """The runs, as many at a time as KT_GPU_PROCESSES says."""
    count = int(os.environ.get("KT_GPU_PROCESSES", "1"))
    last = [run for run in runs if run.get("leave")]  # each ends its process
    rest = [run for run in runs if not run.get("leave")]
    parts = [part for i in range(count) if (part := rest[i::count])] + [[run] for run in last]
    folder.mkdir()

    def answers(i: int) -> Answers:
        return run(python, script, folder / str(i), environment(), **job, runs=parts[i])

    with ThreadPoolExecutor(count) as pool:
        found = {
            name: row for some in pool.map(answers, range(len(parts))) for name, row in some.items()
        }
    return {run["name"]: found[run["name"]] for run in runs}


def _runs() -> list[tuple[dict[str, Any], Kind, dict[str, Any]]]:
    """Name and prompts of each run, its kind, and its kt options."""
    found = []
    for name, kind in _chosen().items():
        one: dict[str, Any] = {"name": name}
        if kind.deferred:
            one["prompts"] = [DEFERRED_PROMPT]
        kt = {
            "method": "BF16",
            "num_gpu_experts": kind.hot,
            "cpuinfer": CPU_THREADS,
            "max_deferred_experts_per_token": kind.deferred,
            "gpu_prefill_token_threshold": kind.streamed,
        }
        if kind.moving:
            kt["enable_dynamic_expert_update"] = "on"
        found.append((one, kind, {} if kind.hot is None else kt))
    return found


def _job(path: Path) -> dict[str, Any]:
    return {"model": str(path), "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS}


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean distance of log-probabilities where the texts before them, and they, are the same."""
    found = []
    for mine, theirs, a, b in zip(
        one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True
    ):
        same = next((i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y), STEPS)
        found += [abs(x - y) for x, y in zip(a[:same], b[:same], strict=True)]
    assert len(found) > STEPS * len(PROMPTS) / 4, len(found)
    return float(torch.tensor(found).mean())


def _judge(engine: str, answers: Answers, reference: Reference) -> None:
    """Ours is nearer to the stock engine of the same mode than that is to itself in the other, or,
    since the modes may be the same to the bit, to transformers in float32."""
    stock = {RUNS[name].mode: row for name, row in answers.items() if RUNS[name].hot is None}
    errors: dict[tuple[bool, int], float] = {}
    for name, answer in answers.items():
        assert "error" not in answer, answer
        kind = RUNS[name]
        if kind.deferred:
            cold = range(kind.hot, EXPERTS)
            check_deferred(
                answer,
                reference,
                DEFERRED_PROMPT,
                kind.deferred,
                cold,
                near=0.05,
                gap=0.2,
                rounded=True,
            )
            continue
        error = check_logprobs(f"{engine} {name}", answer, reference, PROMPTS, 0.05, MEAN)
        if kind.hot is None:
            errors[kind.mode] = error
    modes = list(stock.values())
    spread = max((_distance(modes[0], other) for other in modes[1:]), default=0.0)
    print(f"{engine}: the stock engine's modes: {spread:.4f} apart")
    for name, answer in answers.items():
        kind = RUNS[name]
        if kind.hot is not None and not kind.deferred and kind.mode in stock:
            distance = _distance(answer, stock[kind.mode])
            print(f"{engine} {name}: {distance:.4f} from stock")
            assert distance < max(spread, errors[kind.mode]), (name, distance, spread, errors)


def test_vllm(folder: Path, plain: Path, transformers: Reference) -> None:
    python = gpu_python("KT_VLLM_GPU_PYTHON")
    runs = [
        {
            **one,
            "engine": GPU_VLLM
            | (VLLM_RANKS if kind.gpus > 1 else {})
            | (VLLM_SMALL_GRAPHS if kind.streamed else {}),
            "kt": kt or None,
            "compile": kind.graphs,
            "environment": ({"STREAMED": "all"} if kind.streamed else {})
            | ({"MOVING": "1"} if kind.moving else {}),
            "leave": kind.gpus > 1,  # vLLM does not end its ranks
        }
        for one, kind, kt in _runs()
    ]
    job = _job(plain) | {"modules": ["streamed", "restless"]}
    answers = _answers(python, "vllm_run.py", folder / "vllm", runs, job)
    _judge("vLLM", answers, transformers)
    for name, answer in answers.items():
        hot = RUNS[name].hot
        if hot is not None and hot < EXPERTS:
            assert all(layer["expert_calls"] > 0 for layer in answer["stats"]), answer["stats"]
        if hot == 0 and not RUNS[name].deferred:
            # Of tokens alone, though in graphs six make a batch of eight. Prompts come together.
            tokens = computed_tokens(PROMPTS, STEPS)
            if RUNS[name].streamed:
                tokens -= sum(map(len, PROMPTS))
            assert answer["expert_calls"] == [TOP_K * tokens] * LAYERS, (name, tokens)
        if RUNS[name].moving:
            assert answer["model_stats"]["cache_uploads"] > 0, name
        elif RUNS[name].streamed:
            cold = EXPERTS - (hot or 0)
            assert all(layer["streamed_experts"] >= cold for layer in answer["stats"]), name


@pytest.mark.parametrize("marks", ["0", "1"])
def test_vllm_second_model_runner(
    folder: Path, plain: Path, transformers: Reference, marks: str
) -> None:
    """0.26's default for Qwen2-MoE, Granite-MoE and DeepSeek-V2. It always gives is_padding, which
    it keeps up only with VLLM_MOE_SKIP_PADDING: padding and tokens are told apart without, too."""
    kt = {"method": "BF16", "num_gpu_experts": 0, "cpuinfer": CPU_THREADS}
    one = {"name": "none hot", "engine": GPU_VLLM, "kt": kt, "compile": True}
    variables = environment(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_MOE_SKIP_PADDING=marks)
    answers = run(
        gpu_python("KT_VLLM_GPU_PYTHON"),
        "vllm_run.py",
        folder / f"second {marks}",
        variables,
        **_job(plain),
        runs=[one],
    )
    check_logprobs("vLLM", answers["none hot"], transformers, PROMPTS, 0.05, MEAN)
    tokens = computed_tokens(PROMPTS, STEPS)
    assert set(answers["none hot"]["expert_calls"]) == {TOP_K * tokens}


def test_sglang(folder: Path, plain: Path, transformers: Reference) -> None:
    python = gpu_python("KT_SGLANG_GPU_PYTHON")
    runs = [
        {
            **one,
            "config": json.dumps(kt) if kt else "",
            "arguments": ({} if kind.graphs else NO_GRAPHS)
            | (SGLANG_RANKS if kind.gpus > 1 else {})
            | (SGLANG_SMALL_GRAPHS if kind.streamed else {}),
        }
        for one, kind, kt in _runs()
    ]
    job = _job(plain) | {"device": GPU_SGLANG | SGLANG_COUNTED}
    answers = _answers(python, "sglang_run.py", folder / "sglang", runs, job)
    _judge("SGLang", answers, transformers)
    for name, answer in answers.items():
        if RUNS[name].streamed:  # perhaps none of the experts, which are small
            assert answer["stats"]["models"][0]["streamed_batches"] >= LAYERS, name
        elif RUNS[name].moving:
            assert answer["stats"]["models"][0]["cache_uploads"] > 0, name
        elif RUNS[name].hot == 0 and RUNS[name].graphs and not RUNS[name].deferred:
            # Captures take nothing, and padding neither.
            [counted] = answer["stats"]["models"]
            tokens = computed_tokens(PROMPTS, STEPS)
            assert counted["expert_calls"] == TOP_K * tokens * LAYERS, (name, tokens)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_requests_come_and_go(
    engine: str, folder: Path, plain: Path, transformers: Reference
) -> None:
    """In batches that become smaller, in graphs of 8, 4, 2 and 1, with the engine's own schedule:
    that of SGLang is a step ahead, and may compute a request for a token more than it asked for.
    Nothing that is deferred comes to a request from those before it."""
    steps = list(range(STEPS, 0, -3))
    runs: list[dict[str, Any]] = [
        {"name": "none hot", "steps": steps},
        {"name": "deferred", "before": PROMPTS, "prompts": [DEFERRED_PROMPT]},
    ]
    job = _job(plain) | {"runs": runs}
    for one, hot, deferred in zip(runs, (0, HOT), (0, 1), strict=True):
        kt = {
            "method": "BF16",
            "num_gpu_experts": hot,
            "cpuinfer": CPU_THREADS,
            "max_deferred_experts_per_token": deferred,
        }
        if engine == "vllm":
            one |= {"kt": kt, "engine": GPU_VLLM, "compile": True}
        else:
            one |= {"config": json.dumps(kt)}
            job["device"] = GPU_SGLANG
    python = gpu_python(f"KT_{engine.upper()}_GPU_PYTHON")
    answers = run(python, f"{engine}_run.py", folder / f"{engine} ends", environment(), **job)
    answer = answers["none hot"]
    check_logprobs(f"{engine}, ending", answer, transformers, PROMPTS, 0.05, MEAN)
    assert [len(row) for row in answer["tokens"]] == steps
    if engine == "vllm":
        [calls] = {*answer["expert_calls"]}
    else:
        calls = answer["stats"]["models"][0]["expert_calls"] / LAYERS
    tokens = computed_tokens(PROMPTS, steps)
    assert TOP_K * tokens <= calls <= TOP_K * (tokens + len(PROMPTS))
    check_deferred(
        answers["deferred"],
        transformers,
        DEFERRED_PROMPT,
        1,
        range(HOT, EXPERTS),
        near=0.05,
        gap=0.2,
        rounded=True,
    )
