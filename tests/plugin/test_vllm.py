"""Stock vLLM on the CPU with the plugin: its tokens against transformers, and its refusals.

The engine runs in an environment of its own (KT_VLLM_PYTHON); a start takes 5 to 60 s, so one
process serves many configurations and each test looks at one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    COLD,
    DEMO_MODEL,
    HOT,
    TIMEOUT,
    Answers,
    check_counted,
    check_ends_in_one_line,
    check_equal,
    check_hooks,
    check_logprobs,
    check_quantised_logprobs,
    check_quantised_tokens,
    check_refused,
    demo_job,
    post,
    serving,
)
from engines import environment as shared_environment
from engines import run as shared_run
from tiny_model import (
    EXPERTS,
    LAYERS,
    STEPS,
    Greedy,
    Reference,
    agreement,
    computed_tokens,
    make,
)

from kt_kernel.server_process import free_port

PYTHON = os.environ.get("KT_VLLM_PYTHON")
QUANTISED = ("AMXINT8", "AMXINT4", "INT4_G32")

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="KT_VLLM_PYTHON is not set (make test sets it)"),
    pytest.mark.timeout(TIMEOUT),
]


def environment(**more: str) -> dict[str, str]:
    return shared_environment(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", **more)


def run(folder: Path, env: dict[str, str] | None = None, **job: Any) -> Answers:
    return shared_run(PYTHON, "vllm_run.py", folder, env or environment(), **job)


@pytest.fixture(scope="module")
def zeroed(folder: Path, reference: Reference) -> Path:
    """A checkpoint like the model's, its cold experts zero."""

    def zero(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        down.zero_()

    with reference.changed(zero, COLD):
        reference.model.save_pretrained(folder / "zeroed")
    return folder / "zeroed"


@pytest.fixture(scope="module")
def answers(folder: Path, model: Path, zeroed: Path, prompts: list[list[int]]) -> Answers:
    some = {"method": "BF16", "num_gpu_experts": HOT}
    runs: list[dict[str, Any]] = [
        {"name": "stock", "kt": None},
        {"name": "none hot", "kt": {"method": "BF16"}},
        {"name": "some hot", "kt": some},
        {"name": "all hot", "kt": {"method": "BF16", "num_gpu_experts": EXPERTS}},
        {"name": "weight path", "kt": {**some, "weight_path": str(model)}},
        {"name": "zeroed", "kt": {**some, "weight_path": str(zeroed)}},
        {"name": "deferred", "kt": {"method": "BF16", "max_deferred_experts_per_token": 1}},
        *({"name": method, "kt": {**some, "method": method}} for method in QUANTISED),
        {"name": "environment", "kt": None, "environment": {"KT_CONFIG": json.dumps(some)}},
        {"name": "too many", "kt": {"num_gpu_experts": EXPERTS + 1}},
        {"name": "unknown", "kt": {"gpu_experts": 1}},
        {"name": "parallel", "kt": some, "engine": {"enable_expert_parallel": True}},
        {"name": "lora", "kt": some, "engine": {"enable_lora": True}},
        {"name": "dummy", "kt": some, "engine": {"load_format": "dummy"}},
        {"name": "offload", "kt": some, "engine": {"cpu_offload_gb": 1}},
        {"name": "transformers", "kt": some, "engine": {"model_impl": "transformers"}},
        {"name": "class", "kt": some,
         "engine": {"hf_overrides": {"architectures": ["BailingMoeForCausalLM"]}}},
        # The last one: it leaves an engine behind.
        {"name": "reload", "kt": {**some, "weight_path": str(model)}, "reload": True},
    ]  # fmt: skip
    return run(folder / "eager", model=str(model), prompts=prompts, steps=STEPS, runs=runs)


@pytest.mark.parametrize(
    "name", ["stock", "none hot", "some hot", "all hot", "weight path", "environment"]
)
def test_tokens_are_those_of_transformers(name: str, answers: Answers, greedy: Greedy) -> None:
    check_equal(greedy, answers[name])
    assert answers[name]["tokens"] == answers["stock"]["tokens"]


def test_all_hot_is_bit_identical_to_stock(answers: Answers) -> None:
    assert answers["all hot"]["logprobs"] == answers["stock"]["logprobs"]


def test_without_the_plugin(
    folder: Path, model: Path, prompts: list[list[int]], answers: Answers
) -> None:
    """Our class, registered and not used, changes no bit."""
    env = environment(VLLM_PLUGINS="")
    runs = [{"name": "off", "kt": None}]
    off = run(folder / "off", env, model=str(model), prompts=prompts, steps=STEPS, runs=runs)["off"]
    assert off["hybrid"] == "RoutedExperts" and answers["stock"]["hybrid"] == "HybridExperts"
    for what in ("tokens", "logprobs"):
        assert off[what] == answers["stock"][what]


def test_zeroed_cold_experts_are_noticed(answers: Answers, greedy: Greedy) -> None:
    equal, checked, _ = agreement(greedy, answers["zeroed"]["tokens"])
    assert equal < checked


@pytest.mark.parametrize(
    ("name", "hot"),
    [
        ("none hot", 0),
        ("some hot", HOT),
        ("environment", HOT),
        ("AMXINT4", HOT),
        ("all hot", EXPERTS),
    ],
)
def test_cold_experts_are_ours_alone(
    name: str, hot: int, answers: Answers, prompts: list[list[int]]
) -> None:
    """vLLM holds the hot experts only, and every call of a cold one runs in our kernels."""
    answer = answers[name]
    assert answer["hot_rows"] == hot
    assert len(answer["describe"]) == LAYERS
    if hot == EXPERTS:
        assert answer["stats"] == [{}] * LAYERS
        return
    tokens = computed_tokens(prompts, STEPS)
    for stats in answer["stats"]:
        assert stats["tokens"] >= tokens
        if hot == 0:
            assert stats["expert_calls"] == 2 * stats["tokens"]
            assert answer["expert_calls"] == [2 * tokens] * LAYERS
        else:
            assert 0 < stats["expert_calls"] < 2 * stats["tokens"]


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_tokens(
    method: str, answers: Answers, reference: Reference, prompts: list[list[int]]
) -> None:
    check_quantised_tokens(method, answers[method], reference, prompts)


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_logprobs(
    method: str, answers: Answers, reference: Reference, prompts: list[list[int]]
) -> None:
    check_quantised_logprobs(method, answers[method], reference, prompts)


def test_deferral_changes_the_text_but_not_the_work(answers: Answers) -> None:
    """Late experts are another model; all of them still run, those of the last layer at once."""
    deferred, plain = answers["deferred"], answers["none hot"]
    assert deferred["tokens"] != plain["tokens"]
    for late, now in zip(deferred["stats"], plain["stats"], strict=True):
        assert late["expert_calls"] == now["expert_calls"]
    assert deferred["stats"][-1]["forwards"] == plain["stats"][-1]["forwards"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("too many", "--kt-num-gpu-experts 9: the model has 8 experts a layer; 0 to 8"),
        ("unknown", "kt option 'gpu_experts' is unknown"),
        ("parallel", "--enable-expert-parallel: not supported together with kt options"),
        ("lora", "--enable-lora: not supported together with kt options"),
        ("dummy", "--load-format dummy: the cold experts need their weights one by one"),
        ("offload", "--cpu-offload-gb 1.0: both decide where weights are kept; accepted: 0"),
        ("transformers", "--model-impl transformers: only vLLM's own model code is supported"),
        ("reload", "exchanging weights while serving is not supported"),
        ("class", "model class BailingMoeForCausalLM: not tested with kt-moe"),
    ],
)
def test_refused_from_python(name: str, line: str, answers: Answers) -> None:
    check_refused(answers[name], line)


def test_two_ranks(folder: Path, prompts: list[list[int]]) -> None:
    """Tensor parallel: each rank has its part of the hot experts, the first one all of the cold."""
    path = make(folder / "wide", intermediate=128)  # vLLM's kernels want 32s in each half
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    cpus = sorted(os.sched_getaffinity(0))  # one for each rank
    variables = {"VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}"}
    runs = [
        {"name": "some hot", "kt": {"method": "BF16", "num_gpu_experts": HOT}, "engine": ranks,
         "environment": variables}
    ]  # fmt: skip
    answers = run(folder / "ranks", model=str(path), prompts=prompts, steps=STEPS, runs=runs)
    answer = answers["some hot"]
    check_logprobs("two ranks", answer, Reference(path), prompts, median=0.02, mean=0.05)
    assert all(stats["expert_calls"] > 0 for stats in answer["stats"]), answer["stats"]


def test_compiled(folder: Path, model: Path, prompts: list[list[int]], greedy: Greedy) -> None:
    """vLLM's default mode: torch.compile sees our layer as one opaque operator."""
    runs = [
        {"name": "none hot", "kt": {"method": "BF16"}},
        {"name": "some hot", "kt": {"method": "BF16", "num_gpu_experts": HOT}},
    ]
    answers = run(
        folder / "compiled", model=str(model), prompts=prompts, steps=STEPS, compile=True, runs=runs
    )
    for answer in answers.values():
        check_equal(greedy, answer)


RENAMED = """
import sys
from kt_kernel.plugin_entrypoints import patches, vllm

patches.HOOKS.append(patches.Hook("vllm", "vllm.engine.arg_utils:Renamed", "", "", "", ""))
vllm.register()
from vllm.engine.arg_utils import EngineArgs

EngineArgs(model=sys.argv[1]).create_engine_config()
print("STOCK STARTS")
EngineArgs(model=sys.argv[1], additional_config={"kt": {}}).create_engine_config()
print("HYBRID STARTS")
"""


def test_a_hook_that_is_gone_stops_the_start(model: Path) -> None:
    """Only with kt options: without them vLLM is none of our business."""
    done = subprocess.run(
        [PYTHON, "-c", RENAMED, str(model)],
        capture_output=True, text=True, env=environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode != 0
    assert "STOCK STARTS" in done.stdout and "HYBRID STARTS" not in done.stdout
    assert "this vLLM lacks vllm.engine.arg_utils:Renamed, which the plugin needs" in done.stderr


def test_hooks() -> None:
    check_hooks(PYTHON, "vllm_hooks.py", environment())


# ---- the server


def serve(model: Path, *flags: str) -> list[str]:
    return [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--dtype", "float32",
            "--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager", *flags]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--kt-method", "AMXINT9"), "--kt-method AMXINT9: this method is unknown; accepted: BF16"),
        (("--kt-cpuinfer", "1", "--kt-threadpool-count", "2"), "--kt-cpuinfer 1: fewer threads"),
        (("--kt-num-gpu-experts", "99"), "--kt-num-gpu-experts 99: the model has 8 experts"),
        (("--kt-threadpool-count", "65"), "--kt-threadpool-count 65: "),
        (("--kt-weight-path", str(DEMO_MODEL)), f"--kt-weight-path {DEMO_MODEL}: "),
    ],
)
def test_wrong_flag_ends_in_one_line(flags: tuple[str, ...], line: str, model: Path) -> None:
    check_ends_in_one_line(serve(model, *flags), environment(), line)


def test_server(folder: Path, model: Path, prompts: list[list[int]], greedy: Greedy) -> None:
    port, stats, log = free_port(), folder / "stats.json", folder / "server.log"
    flags = ("--kt-method", "BF16", "--kt-num-gpu-experts", str(HOT), "--port", str(port))
    env = environment(KT_STATS_FILE=str(stats))
    with serving(serve(model, *flags), env, port, log) as url:
        body = {"model": str(model), "prompt": prompts, "max_tokens": STEPS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        choices = post(f"{url}/v1/completions", body)["choices"]
        choices.sort(key=lambda choice: choice["index"])
        check_equal(greedy, {"tokens": [choice["token_ids"] for choice in choices]})
        check_counted(stats, log, prompts)


# ---- the demo model


def test_demo_model_tokens(folder: Path) -> None:
    job, greedy = demo_job()
    runs = [
        {"name": "stock", "kt": None},
        {"name": "none hot", "kt": {"method": "BF16"}},
        {"name": "some hot", "kt": {"method": "BF16", "num_gpu_experts": 4}},
    ]
    for answer in run(folder / "demo", runs=runs, **job).values():
        check_equal(greedy, answer, share=0.5)


def test_demo_command() -> None:
    done = subprocess.run(
        [PYTHON, "-m", "kt_kernel.demo", "--max-tokens", "24"],
        capture_output=True, text=True, env=environment(), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hot, in vLLM's kernels:  [0, 1, 2, 3]" in done.stdout
    calls = int(done.stdout.rsplit("for this request: ", 1)[1])
    assert calls > 24


def test_the_engine_benchmark_runs(tmp_path: Path) -> None:
    """benchmarks/engine.py, one configuration. Never how fast: a timing is not a test."""
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128,
                 "max_num_seqs": 4, "distributed_executor_backend": "uni"}  # fmt: skip
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "engine.py"
    done = subprocess.run(
        [sys.executable, script, "--engine", "vllm", "--python", PYTHON, "--shape", "8,128,96,2",
         "--layers", "2", "--vocabulary", "256", "--hot", "0.5", "--deferral", "1", "--no-stock",
         "--offload", "--prefill", "8", "--streams", "1", "2", "--steps", "4", "--context", "4",
         "--rounds", "1", "--settle", "0", "--arguments", json.dumps(arguments),
         "--json", tmp_path / "result.json"],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [row] = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert row["name"] == "kt 50% hot, d=1" and "error" not in row, row
    assert len(row["decode"]["2"]) == 1 and row["first_token_seconds"]["8"] > 0
    assert "kt 50% hot, d=1" in done.stdout
