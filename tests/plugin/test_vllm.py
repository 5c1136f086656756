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

import broken_checkpoint
import pytest
import torch
import vllm_other_plugin
from engines import (
    COLD,
    HOT,
    SCATTERED,
    STREAMED_FROM,
    TIMEOUT,
    Answers,
    answer_to,
    check_counted,
    check_ends_in_one_line,
    check_equal,
    check_hooks,
    check_logprobs,
    check_quantised_logprobs,
    check_quantised_tokens,
    check_recorded,
    check_refused,
    check_scattered,
    demo_job,
    logprob_distances,
    post,
    scattered_options,
    serving,
)
from engines import environment as shared_environment
from engines import run as shared_run
from grid import FULL, only_full
from lora_files import write
from overflow import HOT as OVERFLOWING_HOT
from overflow import Overflowing, overflowing
from tiny_model import (
    EXPERTS,
    GAP,
    HIDDEN,
    LAYERS,
    STEPS,
    VOCABULARY,
    Greedy,
    Reference,
    agreement,
    computed_tokens,
    make,
)
from trained_adapter import TrainedAdapter, adapted
from trained_adapter import check as check_adapter
from trained_adapter import runs as adapter_runs
from vllm_requests import WORKER_METHODS

from kt_kernel.runtime.text import ranges
from kt_kernel.serving.server_process import free_port

PYTHON = os.environ.get("KT_VLLM_PYTHON")
QUANTISED = ("AMXINT8", "AMXINT4", "INT4_G32")
# Two prompts with a common beginning, of two blocks of the cache, and a longer one, in passes of 48
# tokens at most.
CHUNKS = {"block_size": 32, "max_num_batched_tokens": 48, "max_num_seqs": 4}
_WORDS = [3 + (11 * i * i + 7 * i) % (VOCABULARY - 3) for i in range(180)]
LONG = [_WORDS[:75], _WORDS[:70] + _WORDS[100:109], _WORDS[75:180]]
ADAPTED = "adapter all hot"
REFUSED = "cannot be replaced while the engine runs; restart it with the new weights"

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
def broken(folder: Path) -> dict[str, str]:
    """Options that only fail when a worker reads the weights."""
    path = broken_checkpoint.write(folder / "broken")
    return {"method": broken_checkpoint.METHOD, "weight_path": str(path)}


@pytest.fixture(scope="module")
def calm(folder: Path) -> Overflowing:
    return overflowing(folder)


@pytest.fixture(scope="module")
def answers(
    folder: Path,
    model: Path,
    zeroed: Path,
    incomplete: Path,
    calm: Overflowing,
    adapter: TrainedAdapter,
    prompts: list[list[int]],
) -> Answers:
    some = {"method": "BF16", "num_gpu_experts": HOT}
    every = {**some, "num_gpu_experts": EXPERTS}
    runs: list[dict[str, Any]] = [
        {"name": "stock", "kt": None, "requests": "some"},
        {"name": "none hot", "kt": {"method": "BF16"}},
        {"name": "some hot", "kt": some, "requests": "all"},
        {"name": "stock again", "kt": None},
        {"name": "all hot", "kt": every},
        {"name": "scattered", "kt": scattered_options(model, folder)},
        {"name": "weight path", "kt": {**some, "weight_path": str(model)}, "requests": "all"},
        {"name": "zeroed", "kt": {**some, "weight_path": str(zeroed)}},
        {"name": "deferred", "kt": {"method": "BF16", "max_deferred_experts_per_token": 1}},
        *({"name": method, "kt": {**some, "method": method}} for method in QUANTISED),
        # vLLM's kernels for the CPU have their own layout, so no expert moves.
        {
            "name": "auto",
            "kt": {"num_gpu_experts": HOT, "enable_dynamic_expert_update": "auto"},
        },
        *(
            {"name": name, "kt": options} | ({"requests": "all"} if name == ADAPTED else {})
            for name, options in adapter_runs(adapter)
        ),
        {"name": "adapter in FP8", "kt": {"method": "FP8", "expert_lora_path": str(adapter.fused)}},
        {"name": "environment", "kt": None, "environment": {"KT_CONFIG": json.dumps(some)}},
        {"name": "too many", "kt": {"num_gpu_experts": EXPERTS + 1}},
        {"name": "unknown", "kt": {"gpu_experts": 1}},
        {"name": "lora", "kt": some, "engine": {"enable_lora": True}},
        {"name": "dummy", "kt": some, "engine": {"load_format": "dummy"}},
        {"name": "offload", "kt": some, "engine": {"cpu_offload_gb": 1}},
        {
            "name": "class",
            "kt": some,
            "engine": {"hf_overrides": {"architectures": ["DbrxForCausalLM"]}},
        },
        {"name": "chunks", "kt": some, "engine": CHUNKS, "before": [LONG[0]], "prompts": LONG},
        {
            "name": "float16",
            "kt": {"method": "BF16", "num_gpu_experts": OVERFLOWING_HOT},
            "model": str(calm.path),
            "prompts": calm.prompts,
            "engine": {"dtype": "float16"},
        },
        {
            "name": "streamed",
            "kt": {**some, "gpu_prefill_token_threshold": STREAMED_FROM},
            "environment": {"STREAMED": "on the CPU"},
        },
        # The last one, because it leaves half an engine behind; vLLM would serve the model.
        {"name": "incomplete", "kt": every, "model": str(incomplete)},
    ]
    return run(
        folder / "eager",
        model=str(model),
        prompts=prompts,
        steps=STEPS,
        runs=runs,
        modules=["streamed"],
    )


@pytest.mark.parametrize(
    "name", ["stock", "none hot", "some hot", "all hot", "weight path", "environment", "streamed"]
)
def test_tokens_are_those_of_transformers(name: str, answers: Answers, greedy: Greedy) -> None:
    check_equal(greedy, answers[name])
    assert answers[name]["tokens"] == answers["stock"]["tokens"]


def test_all_hot_is_bit_identical_to_stock(answers: Answers) -> None:
    assert answers["all hot"]["logprobs"] == answers["stock"]["logprobs"]


def test_any_experts_may_be_hot(answers: Answers) -> None:
    check_scattered(answers)
    assert answers["scattered"]["hot_rows"] == len(SCATTERED[0])
    for line, hot in zip(answers["scattered"]["describe"], SCATTERED, strict=True):
        ids = f" [{ranges(hot)}]" if hot else ""
        cold = EXPERTS - len(hot)
        assert f"{len(hot)} hot experts{ids} on the device, {cold} cold on the CPU" in line


def test_what_is_served_is_recorded(
    folder: Path, answers: Answers, prompts: list[list[int]]
) -> None:
    calls = sum(answers["scattered"]["expert_calls"])
    check_recorded(folder, calls, computed_tokens(prompts, STEPS))


def test_long_batches_are_streamed(answers: Answers, prompts: list[list[int]]) -> None:
    """The prompts come as one batch; the CPU computes what is decoded."""
    streamed, alone = answers["streamed"], answers["some hot"]
    for counted, without in zip(streamed["stats"], alone["stats"], strict=True):
        assert counted["streamed_experts"] == len(COLD) * counted["streamed_batches"] > 0
        assert "streamed_batches" not in without
    for calls, without in zip(streamed["expert_calls"], alone["expert_calls"], strict=True):
        assert 0 < calls < without


def test_without_options_vllm_is_as_it_was(answers: Answers) -> None:
    """Before and after an engine with kt options in the same process."""
    assert answers["some hot"]["hybrid"] == "HybridExperts"
    for name in ("stock", "stock again"):
        assert answers[name]["hybrid"] == "RoutedExperts"
        for what in ("tokens", "logprobs"):
            assert answers[name][what] == answers["stock"][what]


def test_overflow_of_a_hot_expert_stays_with_its_tokens(
    answers: Answers, calm: Overflowing
) -> None:
    """In float16, where vLLM's kernels compute a cold route as one of a hot expert."""
    check_equal(calm.greedy, answers["float16"], gap=5 * GAP)


def test_cached_prefixes_and_chunked_prompts(answers: Answers, reference: Reference) -> None:
    answer = answers["chunks"]
    check_equal(reference.greedy(LONG), answer, share=0.5)
    assert answer["cached"] == [64, 64, 0]
    assert min(answer["forwards"]) >= STEPS + 2  # three passes before the longest prompt is done


@pytest.mark.parametrize("name", ["adapter none hot", "adapter some hot", ADAPTED])
def test_an_adapter(
    name: str,
    folder: Path,
    answers: Answers,
    adapter: TrainedAdapter,
    reference: Reference,
    prompts: list[list[int]],
) -> None:
    log = (folder / "eager" / "log").read_text()
    check_adapter(name, answers, log, adapter, reference, prompts)


@pytest.mark.parametrize("name", ["stock", "some hot", "weight path", ADAPTED])
def test_requests_that_change_weights(name: str, answers: Answers) -> None:
    """With kt options they are refused, and the engine serves on. Without them vLLM does them; what
    it then serves is its own business."""
    answer = answers[name]
    found = answer["requests"]
    if name == "stock":
        assert set(found.values()) == {"served"}, found
        return
    assert answer["again"] == answer["tokens"]
    assert found["in the worker"] == "not refused: []"
    for request in ("sleep 0", "wake up", "wake up again"):
        assert found[request] == "served"
    for request in ("reload", "reload in place"):
        assert found[request].startswith("RequestRefused: kt: reload_weights: the weights of cold")
        assert found[request].endswith(REFUSED)
    for request in ("sleep 1", "sleep 2"):
        assert found[request].startswith("RequestRefused: kt: sleep: the weights of cold expert")


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


def test_the_method_of_16_bit_weights(answers: Answers) -> None:
    assert answers["auto"]["logprobs"] == answers["INT4_G32"]["logprobs"]


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
        ("too many", "--kt-num-gpu-experts 9: the model has 8 experts per layer; accepted: 0 to 8"),
        ("unknown", "unknown kt option 'gpu_experts'"),
        ("lora", "--enable-lora: not supported with kt options"),
        ("dummy", "--load-format dummy: cold experts need their weights one by one"),
        (
            "offload",
            "--cpu-offload-gb 1.0: both settings decide where weights are kept",
        ),
        (
            "adapter in FP8",
            "--kt-expert-lora-path: method FP8 keeps the checkpoint's quantised values",
        ),
        ("incomplete", f"StartError: kt: error: layer 3: vLLM {broken_checkpoint.LACKING}"),
        ("class", "model class DbrxForCausalLM was not tested with kt-moe"),
    ],
)
def test_refused_from_python(name: str, line: str, answers: Answers) -> None:
    check_refused(answers[name], line)


@pytest.fixture(scope="module")
def ranks() -> dict[str, Any]:
    """What a run of two ranks needs."""
    cpus = sorted(os.sched_getaffinity(0))  # one for each rank
    return {
        "engine": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}"},
    }


def test_two_ranks(folder: Path, prompts: list[list[int]], ranks: dict[str, Any]) -> None:
    """Tensor parallel: each rank has its part of the hot experts, the first one all of the cold,
    all with an adapter."""
    path = make(folder / "wide", intermediate=128)  # vLLM's kernels want 32s in each half
    lora = folder / "lora"
    deltas = write(lora, experts=EXPERTS, hidden=HIDDEN, inter=128, layers=range(LAYERS), size=0.1)
    kt = {"method": "BF16", "num_gpu_experts": HOT, "expert_lora_path": str(lora)}
    job = {"processes": True, "runs": [{"name": "some hot", "kt": kt, **ranks}]}
    answers = run(folder / "ranks", model=str(path), prompts=prompts, steps=STEPS, **job)
    answer, reference = answers["some hot"], Reference(path)
    with adapted(reference, deltas):
        near = check_logprobs("two ranks", answer, reference, prompts, median=0.02, mean=0.05)
    without, _ = logprob_distances("without the adapter", answer, reference, prompts)
    assert without.mean() > 10 * near
    assert all(stats["expert_calls"] > 0 for stats in answer["stats"]), answer["stats"]


@only_full
def test_an_error_in_a_rank(
    folder: Path,
    model: Path,
    prompts: list[list[int]],
    broken: dict[str, str],
    ranks: dict[str, Any],
) -> None:
    """What a rank finds while it loads comes out of vLLM's processes as an exception. Usual runs
    have that with SGLang."""
    job = {"processes": True, "runs": [{"name": "broken", "kt": broken, **ranks}]}
    answers = run(folder / "broken ranks", model=str(model), prompts=prompts, steps=STEPS, **job)
    check_refused(answers["broken"], f"StartError: kt: error: {broken['weight_path']}")
    assert answers["broken"]["error"].count("kt: error") == 1


def test_compiled(folder: Path, model: Path, prompts: list[list[int]], greedy: Greedy) -> None:
    """As vLLM runs by default: torch.compile, which sees our layer as one opaque operator, and the
    engine in a process of its own."""
    runs = [{"name": "some hot", "kt": {"method": "BF16", "num_gpu_experts": HOT}}]
    job = {"compile": True, "processes": True, "runs": runs}
    answers = run(folder / "compiled", model=str(model), prompts=prompts, steps=STEPS, **job)
    check_equal(greedy, answers["some hot"])


def test_hooks() -> None:
    check_hooks(PYTHON, "vllm_hooks.py", environment())


@pytest.mark.parametrize("order", ["before", "after"] if FULL else ["after"])
def test_another_plugin_has_the_place(order: str, tmp_path: Path) -> None:
    """Without kt options it works; with them a line says so. In both orders of loading."""
    folder = vllm_other_plugin.write(tmp_path / "other")
    check_hooks(PYTHON, "vllm_other_plugin.py", environment(), str(folder), order)


# ---- the server


def serve(model: Path, *flags: str) -> list[str]:
    return [
        PYTHON,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--dtype",
        "float32",
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "8",
        "--enforce-eager",
        *flags,
    ]


def test_wrong_flag_ends_in_one_line(model: Path) -> None:
    line = "--kt-num-gpu-experts 99: the model has 8 experts"
    check_ends_in_one_line(serve(model, "--kt-num-gpu-experts", "99"), environment(), line)


def test_an_error_while_loading_ends_in_one_line(model: Path, broken: dict[str, str]) -> None:
    flags = ("--kt-method", broken["method"], "--kt-weight-path", broken["weight_path"])
    check_ends_in_one_line(serve(model, *flags), environment(), broken["weight_path"])


# Requests to a server in development mode, and what the answer names.
REQUESTS = {
    "/sleep?level=1": (None, "sleep: the weights of cold experts cannot be released"),
    "/sleep?level=2": (None, "sleep: the weights of cold experts cannot be released"),
    "/init_weight_transfer_engine": ({"init_info": {}}, f"init_weight_transfer_engine: {REFUSED}"),
    "/start_weight_update": (None, "start_weight_update: "),
    "/start_draft_weight_update": (None, "start_draft_weight_update: "),
    "/update_weights": ({"update_info": {}}, "update_weights: "),
    "/finish_weight_update": ({"weight_version": "2"}, "finish_weight_update: "),
    "/weight_checker": ({"action": "reset"}, "reset_weights: "),
    "/scale_elastic_ep": ({"new_data_parallel_size": 2}, "scale_elastic_ep: the number of ranks"),
    "/v1/load_lora_adapter": (
        {"lora_name": "a", "lora_path": "/tmp/a"},
        "add_lora: with kt options, LoRA adapters cannot be loaded while the engine runs; restart",
    ),
}
METHODS = (*WORKER_METHODS, "save_tensorized_model", "checkpoint_restore", "swap_weights")


def check_requests(url: str) -> None:
    """Those that change or move weights fail; the engine does the others."""
    for path, (body, line) in REQUESTS.items():
        status, text = answer_to(url + path, body)
        assert 400 <= status < 600 and f"kt: {line.replace(REFUSED, '')}" in text, (path, text)
    for method in METHODS:
        status, text = answer_to(f"{url}/collective_rpc", {"method": method})
        assert status == 400 and f"kt: {method}: " in text, (method, status, text)
    for path, body in (
        ("/sleep?level=0", None),
        ("/wake_up?tags=scheduling", None),
        ("/pause", None),
        ("/resume", None),
        ("/weight_checker", {"action": "checksum"}),
        ("/collective_rpc", {"method": "check_health"}),
        ("/reset_prefix_cache", None),
    ):
        status, text = answer_to(url + path, body)
        assert status == 200, (path, text)


def test_server(folder: Path, model: Path, prompts: list[list[int]], greedy: Greedy) -> None:
    """It answers, counts, refuses what it cannot do, and answers the same afterwards."""
    port, stats, log = free_port(), folder / "stats.json", folder / "server.log"
    flags = ("--kt-method", "BF16", "--kt-num-gpu-experts", str(HOT), "--port", str(port))
    # As in the published commands of large models, for one rank.
    flags += ("--tensor-parallel-size", "1", "--data-parallel-size", "1", "--async-scheduling")
    flags += ("--enable-expert-parallel", "--trust-remote-code", "--enable-auto-tool-choice")
    flags += ("--tool-call-parser", "hermes")
    env = environment(
        KT_STATS_FILE=str(stats), VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1"
    )
    body = {
        "model": str(model),
        "prompt": prompts,
        "max_tokens": STEPS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def tokens(url: str) -> list[list[int]]:
        choices = post(f"{url}/v1/completions", body)["choices"]
        choices.sort(key=lambda choice: choice["index"])
        return [choice["token_ids"] for choice in choices]

    with serving(serve(model, *flags), env, port, log) as url:
        before = tokens(url)
        check_equal(greedy, {"tokens": before})
        check_counted(stats, log, prompts)
        check_requests(url)
        assert tokens(url) == before


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
        capture_output=True,
        text=True,
        env=environment(),
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hot, in vLLM's kernels:  [0, 1, 2, 3]" in done.stdout
    calls = int(done.stdout.rsplit("for this request: ", 1)[1])
    assert calls > 24


def test_the_engine_benchmark_runs(tmp_path: Path) -> None:
    """benchmarks/engine.py, one configuration. Never how fast: a timing is not a test."""
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "distributed_executor_backend": "uni",
    }
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "engine.py"
    done = subprocess.run(
        [
            sys.executable,
            script,
            "--engine",
            "vllm",
            "--python",
            PYTHON,
            *(
                "--shape 8,128,96,2 --layers 2 --vocabulary 256 --hot 0.5"
                " --deferral 1 --no-stock --offload --prefill 8 --streams 1 2"
                " --steps 4 --context 4 --rounds 1 --settle 0 --arguments"
            ).split(),
            json.dumps(arguments),
            "--json",
            tmp_path / "result.json",
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [row] = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert row["name"] == "kt 50% hot, d=1" and "error" not in row, row
    assert len(row["decode"]["2"]) == 1 and row["first_token_seconds"]["8"] > 0
    assert "kt 50% hot, d=1" in done.stdout
