"""Stock SGLang on the CPU with the plugin: its tokens against transformers, and its refusals.

The engine runs in an environment of its own (KT_SGLANG_PYTHON); a start takes 10 s and more, so one
process serves many configurations and each test looks at one of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deferral import check_deferred
from engines import (
    COLD,
    DEMO_MODEL,
    HERE,
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
    TOP_K,
    Greedy,
    Reference,
    agreement,
    computed_tokens,
    make,
)

from kt_kernel.server_process import free_port

PYTHON = os.environ.get("KT_SGLANG_PYTHON")
QUANTISED = ("AMXINT8", "INT4_G32")

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="KT_SGLANG_PYTHON is not set (make test sets it)"),
    pytest.mark.timeout(TIMEOUT),
]


def environment(**more: str) -> dict[str, str]:
    path = [str(HERE / "sgl_kernel_standin"), os.environ.get("PYTHONPATH", "")]
    return shared_environment(
        PYTHONPATH=os.pathsep.join(filter(None, path)), SGLANG_USE_CPU_ENGINE="1", **more
    )


def run(folder: Path, env: dict[str, str] | None = None, **job: Any) -> Answers:
    return shared_run(PYTHON, "sglang_run.py", folder, env or environment(), **job)


@pytest.fixture(scope="module")
def answers(folder: Path, model: Path, prompts: list[list[int]]) -> Answers:
    """Options are given in both ways, and not at all, to processes that SGLang spawns; for the rest
    they are forks, which start sooner (sglang_run.py)."""
    some = {"kt_method": "BF16", "kt_num_gpu_experts": HOT}
    spawned: list[dict[str, Any]] = [
        {"name": "stock"},
        {"name": "none hot", "config": '{"method": "BF16"}'},
        {"name": "some hot", "arguments": some},
    ]
    forked: list[dict[str, Any]] = [
        {"name": "all hot", "arguments": {**some, "kt_num_gpu_experts": EXPERTS}},
        {"name": "AMXINT8", "arguments": {**some, "kt_method": "AMXINT8"}},
        {"name": "INT4_G32", "arguments": {**some, "kt_method": "INT4_G32",
                                           "kt_weight_path": str(model)}},
        {"name": "deferred", "prompts": prompts[-1:],
         "arguments": {**some, "kt_max_deferred_experts_per_token": 1}},
        {"name": "too many", "arguments": {"kt_num_gpu_experts": EXPERTS + 1}},
        {"name": "unknown", "config": '{"gpu_experts": 1}'},
        {"name": "no JSON", "config": "method=BF16"},
        {"name": "two stages", "arguments": {**some, "pp_size": 2}},
        {"name": "lora", "arguments": {**some, "enable_lora": True, "max_lora_rank": 8,
                                       "lora_target_modules": ["q_proj"]}},
        {"name": "dummy", "arguments": {**some, "load_format": "dummy"}},
        {"name": "sleep", "arguments": {**some, "enable_memory_saver": True}},
        {"name": "both wrong", "arguments": some, "config": "method=BF16"},
        {"name": "quantised", "arguments": {**some, "quantization": "fp8"}},
        {"name": "GPTQ", "arguments": {
            **some,
            "json_model_override_args": '{"quantization_config": {"quant_method": "gptq"}}'}},
        {"name": "compiled", "arguments": {**some, "enable_torch_compile": True}},
        {"name": "class", "arguments": {
            **some, "json_model_override_args": '{"architectures": ["Dots1ForCausalLM"]}'}},
    ]  # fmt: skip
    job = {"model": str(model), "prompts": prompts, "steps": STEPS}
    return run(folder / "spawned", **job, runs=spawned) | run(
        folder / "forked", **job, runs=forked, fork=True
    )


@pytest.mark.parametrize("name", ["stock", "none hot", "some hot", "all hot"])
def test_tokens_are_those_of_transformers(name: str, answers: Answers, greedy: Greedy) -> None:
    check_equal(greedy, answers[name])
    assert answers[name]["tokens"] == answers["stock"]["tokens"]


@pytest.mark.parametrize("name", ["stock", "none hot", "some hot"])
def test_logprobs(
    name: str,
    answers: Answers,
    reference: Reference,
    prompts: list[list[int]],
) -> None:
    """The engine computes in float32, our BF16 kernels round their input once."""
    found = torch.tensor(answers[name]["logprobs"]).flatten()
    error = (reference.logprobs(prompts, answers[name]["tokens"]) - found).abs()
    assert error.mean() < (1e-4 if name == "stock" else 0.02), error.mean()


def test_all_hot_is_bit_identical_to_stock(answers: Answers) -> None:
    assert answers["all hot"]["logprobs"] == answers["stock"]["logprobs"]


def test_without_the_plugin(
    folder: Path, model: Path, prompts: list[list[int]], answers: Answers
) -> None:
    """Our hooks, applied and not used, change no bit."""
    env = environment(SGLANG_PLUGINS="none")
    runs = [{"name": "off"}]
    off = run(folder / "off", env, model=str(model), prompts=prompts, steps=STEPS, runs=runs)["off"]
    assert not off["plugin"] and answers["stock"]["plugin"]
    for what in ("tokens", "logprobs"):
        assert off[what] == answers["stock"][what]


def test_zeroed_cold_experts_would_be_noticed(
    answers: Answers, reference: Reference, prompts: list[list[int]]
) -> None:
    def zero(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        down.zero_()

    with reference.changed(zero, COLD):
        equal, checked, _ = agreement(reference.greedy(prompts), answers["some hot"]["tokens"])
    assert equal < checked / 2


@pytest.mark.parametrize(
    ("name", "hot"), [("none hot", 0), ("some hot", HOT), ("INT4_G32", HOT), ("all hot", EXPERTS)]
)
def test_every_cold_call_is_ours(
    name: str, hot: int, answers: Answers, prompts: list[list[int]]
) -> None:
    (counted,) = answers[name]["stats"]["models"]
    assert [layer["hot_experts"] for layer in counted["layers"]] == [list(range(hot))] * LAYERS
    tokens = computed_tokens(prompts, STEPS)
    routes = LAYERS * TOP_K * tokens
    if hot == EXPERTS:
        assert "expert_calls" not in counted
    elif hot == 0:
        assert counted["expert_calls"] == routes
    else:
        assert counted["tokens"] == LAYERS * tokens
        assert 0 < counted["expert_calls"] < routes


def test_stock_run_does_not_know_us(answers: Answers) -> None:
    assert answers["stock"]["stats"] is None


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


def test_deferral(answers: Answers, reference: Reference, prompts: list[list[int]]) -> None:
    """With one expert late, tokens and log-probabilities are those of the rule in transformers."""
    check_deferred(answers["deferred"], reference, prompts[-1], 1, COLD, near=0.03, gap=0.1)


def test_tensor_parallel(folder: Path, prompts: list[list[int]]) -> None:
    """Two ranks with half of each hot expert; the first one computes the cold experts, whole. The
    experts' size is one that SGLang pads for two ranks."""
    path = make(folder / "halves", intermediate=96, head_dim=64)
    runs = [
        {"name": "some hot",
         "arguments": {"kt_method": "BF16", "kt_num_gpu_experts": HOT, "tp_size": 2}}
    ]  # fmt: skip
    cpus = sorted(os.sched_getaffinity(0))  # one for each rank
    bound = environment(SGLANG_CPU_OMP_THREADS_BIND=f"{cpus[0]}|{cpus[-1]}")
    answers = run(folder / "ranks", bound, model=str(path), prompts=prompts, steps=STEPS, runs=runs)
    answer = answers["some hot"]
    check_logprobs("two ranks", answer, Reference(path), prompts, median=0.02, mean=0.05)
    [counted] = answer["stats"]["models"]
    assert counted["expert_calls"] > 0, counted


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("too many", "--kt-num-gpu-experts 9: the model has 8 experts a layer; 0 to 8"),
        ("unknown", "kt option 'gpu_experts' is unknown"),
        ("no JSON", "KT_CONFIG 'method=BF16': not JSON"),
        ("both wrong", "KT_CONFIG 'method=BF16': not JSON"),
        ("dummy", "--load-format dummy: the cold experts need their weights one by one"),
        ("sleep", "--enable-memory-saver: the cold experts' weights cannot be exchanged"),
        ("two stages", "--pp-size 2: of several ranks kt-moe serves those of tensor parallelism"),
        ("lora", "--enable-lora: LoRA is not supported together with kt options yet; remove it"),
        ("quantised", "a model quantised with fp8: name its folder with --kt-weight-path too"),
        ("GPTQ", "a model quantised with gptq: the hot experts' kernels were not tried; accepted"),
        ("compiled", "--enable-torch-compile: our kernels are no torch operations; remove it"),
        ("class", "model class Dots1ForCausalLM: not tested with kt-moe"),
    ],
)
def test_refused_from_python(name: str, line: str, answers: Answers) -> None:
    check_refused(answers[name], line)


def test_hooks() -> None:
    check_hooks(PYTHON, "sglang_hooks.py", environment())


# ---- the server


def serve(model: Path, *flags: str) -> list[str]:
    return [PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", "float32",
            "--device", "cpu", "--attention-backend", "torch_native", "--disable-radix-cache",
            "--disable-overlap-schedule", "--grammar-backend", "none", "--max-total-tokens", "1024",
            "--mem-fraction-static", "0.6", "--skip-server-warmup", *flags]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--kt-method", "AMXINT9"), "--kt-method AMXINT9: this method is unknown; accepted: BF16"),
        (("--kt-cpuinfer", "four"), "--kt-cpuinfer four: an integer of at least 1 is accepted"),
        (("--kt-expert-stats", "x"), "--kt-expert-stats is not supported by this version"),
        (("--kt-num-gpu-experts", "99"), "--kt-num-gpu-experts 99: the model has 8 experts"),
        (("--kt-cpuinfer", "5000"), "--kt-cpuinfer 5000: "),
        (("--kt-weight-path", str(DEMO_MODEL)), f"--kt-weight-path {DEMO_MODEL}: "),
    ],
)
def test_wrong_flag_ends_in_one_line(flags: tuple[str, ...], line: str, model: Path) -> None:
    check_ends_in_one_line(serve(model, *flags), environment(), line)


def test_server(folder: Path, model: Path, prompts: list[list[int]], greedy: Greedy) -> None:
    """Options given as flags reach the worker; answers over HTTP are right."""
    port, stats, log = free_port(), folder / "stats.json", folder / "server.log"
    flags = ("--kt-method", "BF16", "--kt-num-gpu-experts", str(HOT), "--port", str(port))
    env = environment(KT_STATS_FILE=str(stats))
    with serving(serve(model, *flags), env, port, log) as url:
        sampling = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}
        found = post(f"{url}/generate", {"input_ids": prompts, "sampling_params": sampling})
        check_equal(greedy, {"tokens": [one["output_ids"] for one in found]})
        check_counted(stats, log, prompts)


# ---- the demo model


def test_demo_model_tokens(folder: Path) -> None:
    job, greedy = demo_job()
    runs = [
        {"name": "stock"},
        {"name": "none hot", "config": '{"method": "BF16"}'},
        {"name": "some hot", "arguments": {"kt_method": "BF16", "kt_num_gpu_experts": 4}},
    ]
    for answer in run(folder / "demo", runs=runs, fork=True, **job).values():
        check_equal(greedy, answer, share=0.5)
