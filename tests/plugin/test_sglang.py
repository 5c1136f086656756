"""Stock SGLang on the CPU with the plugin: its tokens against transformers, and its refusals.

The engine runs in an environment of its own (KT_SGLANG_PYTHON); a start takes 10 s and more, so one
process serves many configurations and each test looks at one of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import broken_checkpoint
import pytest
import torch
from deferral import check_deferred
from engines import (
    COLD,
    HERE,
    HOT,
    SCATTERED,
    SGLANG_COUNTED,
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
from lora_files import write
from tiny_model import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    STEPS,
    TOP_K,
    Greedy,
    Reference,
    agreement,
    computed_tokens,
    make,
)
from trained_adapter import TrainedAdapter, adapted
from trained_adapter import check as check_adapter
from trained_adapter import runs as adapter_runs

from kt_kernel.serving.server_process import free_port

PYTHON = os.environ.get("KT_SGLANG_PYTHON")
QUANTISED = ("AMXINT8", "INT4_G32")
CHUNK = 16  # tokens of a chunk of a prompt
COMMON = 40  # tokens that the long prompts begin with

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
def broken(folder: Path) -> Path:
    return broken_checkpoint.write(folder / "broken")


@pytest.fixture(scope="module")
def long(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    """Three prompts with the same first COMMON tokens; the first one has no others. The text of
    those with more is far from ties."""
    common = sum(prompts, [])[:COMMON]
    asked = [common + prompt for prompt in prompts]
    gaps = [min(row) for row in reference.greedy(asked).gaps]
    return [common, *sorted(asked, key=lambda prompt: -gaps[asked.index(prompt)])[:2]]


@pytest.fixture(scope="module")
def demo() -> tuple[dict[str, Any], Greedy]:
    return demo_job()


@pytest.fixture(scope="module")
def answers(
    folder: Path,
    model: Path,
    incomplete: Path,
    prompts: list[list[int]],
    long: list[list[int]],
    demo: tuple[dict[str, Any], Greedy],
    adapter: TrainedAdapter,
) -> Answers:
    """Options are given in both ways, and not at all. Most processes are forks, which start sooner
    than those that SGLang spawns (sglang_run.py)."""
    some = {"kt_method": "BF16", "kt_num_gpu_experts": HOT}
    bad = {**some, "kt_num_gpu_experts": EXPERTS, "model_path": str(incomplete)}
    spawned = [{"name": "some hot", "fails_first": bad, "arguments": some, "requests": None}]
    forked: list[dict[str, Any]] = [
        {"name": "stock", "requests": ["update_weights_from_disk"]},
        {"name": "off", "env": {"SGLANG_PLUGINS": "none"}},
        {"name": "none hot", "config": '{"method": "BF16"}'},
        {"name": "counted", "config": '{"method": "BF16"}', "arguments": SGLANG_COUNTED},
        {"name": "all hot", "arguments": {**some, "kt_num_gpu_experts": EXPERTS}},
        {
            "name": "scattered",
            "config": json.dumps(scattered_options(model, folder)),
            "arguments": SGLANG_COUNTED,
        },
        {
            "name": "streamed",
            "config": json.dumps(
                {
                    "method": "BF16",
                    "num_gpu_experts": HOT,
                    "gpu_prefill_token_threshold": STREAMED_FROM,
                }
            ),
            "env": {"STREAMED": "on the CPU"},
        },
        {
            "name": "moving",
            "config": json.dumps(
                {"method": "BF16", "num_gpu_experts": HOT, "enable_dynamic_expert_update": "on"}
            ),
            "env": {"MOVING": "1"},
        },
        {"name": "AMXINT8", "arguments": {**some, "kt_method": "AMXINT8"}},
        {
            "name": "INT4_G32",
            "arguments": {**some, "kt_method": "INT4_G32", "kt_weight_path": str(model)},
        },
        {"name": "auto", "arguments": {"kt_num_gpu_experts": HOT}},
        {
            "name": "deferred",
            "prompts": prompts[-1:],
            "arguments": {**some, "kt_max_deferred_experts_per_token": 1},
        },
        {
            "name": "long prompts",
            "before": long[:1],
            "prompts": long[1:],
            "arguments": {**some, "chunked_prefill_size": CHUNK},
        },
        {"name": "demo stock", **demo[0]},
        {"name": "demo none hot", **demo[0], "config": '{"method": "BF16"}'},
        {"name": "demo some hot", **demo[0], "arguments": {**some, "kt_num_gpu_experts": 4}},
        *(
            {"name": name, "config": json.dumps(options)}
            | ({"requests": ["update_weights_from_disk"]} if name == "adapter all hot" else {})
            for name, options in adapter_runs(adapter)
        ),
        {"name": "too many", "arguments": {"kt_num_gpu_experts": EXPERTS + 1}},
        {"name": "unknown", "config": '{"gpu_experts": 1}'},
        {"name": "both wrong", "arguments": some, "config": "method=BF16"},
        {
            "name": "GPTQ",
            "arguments": {
                **some,
                "json_model_override_args": '{"quantization_config": {"quant_method": "gptq"}}',
            },
        },
        {
            "name": "class",
            "arguments": {
                **some,
                "json_model_override_args": '{"architectures": ["DbrxForCausalLM"]}',
            },
        },
    ]
    job = {"model": str(model), "prompts": prompts, "steps": STEPS}
    return run(folder / "spawned", **job, runs=spawned) | run(
        folder / "forked", **job, runs=forked, fork=True, modules=["streamed", "restless"]
    )


@pytest.mark.parametrize(
    "name", ["stock", "none hot", "some hot", "all hot", "counted", "streamed", "moving"]
)
def test_tokens_are_those_of_transformers(name: str, answers: Answers, greedy: Greedy) -> None:
    check_equal(greedy, answers[name])
    assert answers[name]["tokens"] == answers["stock"]["tokens"]


@pytest.mark.parametrize("name", ["stock", "none hot", "some hot", "moving"])
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


def test_any_experts_may_be_hot(answers: Answers) -> None:
    check_scattered(answers)
    (counted,) = answers["scattered"]["stats"]["models"]
    assert [tuple(layer["hot_experts"]) for layer in counted["layers"]] == [*SCATTERED]


def test_what_is_served_is_recorded(
    folder: Path, answers: Answers, prompts: list[list[int]]
) -> None:
    (counted,) = answers["scattered"]["stats"]["models"]
    check_recorded(folder, counted["expert_calls"], computed_tokens(prompts, STEPS))


def test_long_batches_are_streamed(answers: Answers) -> None:
    [streamed], [alone] = (answers[name]["stats"]["models"] for name in ("streamed", "some hot"))
    assert streamed["streamed_experts"] == len(COLD) * streamed["streamed_batches"] > 0
    assert "streamed_batches" not in alone


def test_experts_move_at_every_step(answers: Answers) -> None:
    (counted,) = answers["moving"]["stats"]["models"]
    assert counted["cache_uploads"] > 15 and counted["cache_evictions"] > 15
    assert counted["cache_misses"] > 0 < counted["cache_hits"]
    assert [tuple(layer["hot_experts"]) for layer in counted["layers"]] != [(*range(HOT),)] * len(
        counted["layers"]
    )


def test_without_the_plugin(answers: Answers) -> None:
    """Installed and without options, it changes no bit."""
    assert not answers["off"]["plugin"] and answers["stock"]["plugin"]
    for what in ("tokens", "logprobs"):
        assert answers["off"][what] == answers["stock"][what]


def test_zeroed_cold_experts_would_be_noticed(
    answers: Answers, reference: Reference, prompts: list[list[int]]
) -> None:
    def zero(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        down.zero_()

    with reference.changed(zero, COLD):
        equal, checked, _ = agreement(reference.greedy(prompts), answers["some hot"]["tokens"])
    assert equal < checked / 2


@pytest.mark.parametrize(
    ("name", "hot"),
    [("none hot", 0), ("counted", 0), ("some hot", HOT), ("INT4_G32", HOT), ("all hot", EXPERTS)],
)
def test_every_cold_call_is_ours(
    name: str, hot: int, answers: Answers, prompts: list[list[int]]
) -> None:
    """SGLang's own schedule is a step ahead: it may compute a token more for each request."""
    (counted,) = answers[name]["stats"]["models"]
    assert [layer["hot_experts"] for layer in counted["layers"]] == [list(range(hot))] * LAYERS
    tokens = computed_tokens(prompts, STEPS) - sum(answers[name]["cached"])
    most = tokens if name == "counted" else tokens + len(prompts)
    if hot == EXPERTS:
        assert "expert_calls" not in counted
    elif hot == 0:
        assert tokens <= counted["expert_calls"] / (LAYERS * TOP_K) <= most
    elif name != "some hot":  # whose prompts were served twice
        assert tokens <= counted["tokens"] / LAYERS <= most
        assert 0 < counted["expert_calls"] < LAYERS * TOP_K * tokens


def test_long_prompts_with_a_common_beginning(
    folder: Path, answers: Answers, reference: Reference, long: list[list[int]]
) -> None:
    """They are computed in chunks, and what they have in common is in the cache."""
    answer = answers["long prompts"]
    check_equal(reference.greedy(long[1:]), answer)
    assert all(cached >= COMMON for cached in answer["cached"]), answer["cached"]
    log = (folder / "forked" / "log").read_text()
    assert log.count(f"#new-seq: 1, #new-token: {CHUNK}, #cached-token: 0,") == COMMON // CHUNK


def test_requests_that_concern_weights(answers: Answers) -> None:
    """They fail, and say who refuses them; the engine goes on as before."""
    answer = answers["some hot"]
    assert len(answer["requests"]) > 20
    for name, said in answer["requests"].items():
        method = name.removeprefix("scheduler:")
        if name == "scheduler:release_memory_occupation":  # its answer cannot say more
            assert said.startswith("[ReleaseMemoryOccupationReqOutput("), said
        elif name == "scheduler:get_weights_by_name":
            assert "parameter=None" in said, said
        else:
            assert f"kt-moe does not support {method}: " in said, said
            failed = ("(False, ", "RequestRefused: ", "AssertionError: ")
            assert "success=False" in said or said.startswith(failed), said
    assert answer["again"] == answer["tokens"]


@pytest.mark.parametrize("name", ["adapter none hot", "adapter some hot", "adapter all hot"])
def test_an_adapter(
    name: str,
    folder: Path,
    answers: Answers,
    adapter: TrainedAdapter,
    reference: Reference,
    prompts: list[list[int]],
) -> None:
    log = (folder / "forked" / "log").read_text()
    check_adapter(name, answers, log, adapter, reference, prompts)
    if name == "adapter all hot":  # SGLang's own update would load the weights without it
        said = answers[name]["requests"]["update_weights_from_disk"]
        assert "kt-moe does not support update_weights_from_disk" in said, said
        assert answers[name]["again"] == answers[name]["tokens"]


def test_stock_engine_exchanges_weights(answers: Answers) -> None:
    said = answers["stock"]["requests"]["update_weights_from_disk"]
    assert said.startswith("(True, 'Succeeded to update model weights.'"), said
    assert answers["stock"]["again"] == answers["stock"]["tokens"]


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


def test_the_method_of_16_bit_weights(answers: Answers) -> None:
    """SGLang's own default of --kt-method does not count."""
    assert answers["auto"]["logprobs"] == answers["INT4_G32"]["logprobs"]


def test_deferral(answers: Answers, reference: Reference, prompts: list[list[int]]) -> None:
    """With one expert late, tokens and log-probabilities are those of the rule in transformers."""
    check_deferred(answers["deferred"], reference, prompts[-1], 1, COLD, near=0.03, gap=0.1)


def test_tensor_parallel(folder: Path, prompts: list[list[int]]) -> None:
    """Two ranks with half of each hot expert; the first one computes the cold experts, whole; all
    have an adapter. The experts' size is one that SGLang pads for two ranks."""
    path, lora = make(folder / "halves", intermediate=96, head_dim=64), folder / "lora"
    deltas = write(
        lora,
        layout="per_expert",
        experts=EXPERTS,
        hidden=HIDDEN,
        inter=96,
        layers=range(LAYERS),
        size=0.1,
    )
    options = {"method": "BF16", "num_gpu_experts": HOT, "expert_lora_path": str(lora)}
    runs = [{"name": "some hot", "config": json.dumps(options), "arguments": {"tp_size": 2}}]
    cpus = sorted(os.sched_getaffinity(0))  # one for each rank
    bound = environment(SGLANG_CPU_OMP_THREADS_BIND=f"{cpus[0]}|{cpus[-1]}")
    answers = run(folder / "ranks", bound, model=str(path), prompts=prompts, steps=STEPS, runs=runs)
    answer, reference = answers["some hot"], Reference(path)
    with adapted(reference, deltas):
        near = check_logprobs("two ranks", answer, reference, prompts, median=0.02, mean=0.05)
    without, _ = logprob_distances("without the adapter", answer, reference, prompts)
    assert without.mean() > 10 * near
    [counted] = answer["stats"]["models"]
    assert counted["expert_calls"] > 0, counted


def test_error_of_a_worker_is_raised(answers: Answers) -> None:
    """SGLang would serve a hot expert without one of its matrices. The process can start another
    engine, which is the one of the other tests."""
    error = answers["some hot"]["failed"]
    line = f"layer {LAYERS - 1}: SGLang {broken_checkpoint.LACKING}"
    assert error.startswith(f"StartError: kt: error: {line}") and "\n" not in error, error


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("too many", "--kt-num-gpu-experts 9: the model has 8 experts per layer; accepted: 0 to 8"),
        ("unknown", "unknown kt option 'gpu_experts'"),
        ("both wrong", "KT_CONFIG 'method=BF16': not JSON"),
        ("GPTQ", "is not quantised, and kt-moe does not support experts that the engine quantises"),
        ("class", "model class DbrxForCausalLM was not tested with kt-moe"),
    ],
)
def test_refused_from_python(name: str, line: str, answers: Answers) -> None:
    check_refused(answers[name], line)


@pytest.mark.parametrize("script", ["sglang_hooks.py", "sglang_beside.py"])
def test_hooks(script: str) -> None:
    check_hooks(PYTHON, script, environment())


# ---- the server


def serve(model: Path, *flags: str) -> list[str]:
    return [
        PYTHON,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
        *(
            "--dtype float32 --device cpu --attention-backend torch_native"
            " --grammar-backend none --max-total-tokens 1024"
            " --mem-fraction-static 0.6 --skip-server-warmup"
        ).split(),
        *flags,
    ]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--kt-method", "AMXINT9"), "--kt-method AMXINT9: unknown method; accepted: auto"),
        (("--kt-num-gpu-experts", "3", "--dp", "2"), "--dp-size 2: kt-moe supports tensor paralle"),
    ],
)
def test_wrong_flag_ends_in_one_line(flags: tuple[str, ...], line: str, model: Path) -> None:
    check_ends_in_one_line(serve(model, *flags), environment(), line)


def test_error_of_a_worker_ends_in_one_line(model: Path, broken: Path) -> None:
    flags = ("--kt-method", broken_checkpoint.METHOD, "--kt-weight-path", str(broken))
    command = serve(model, *flags, "--port", str(free_port()))
    line = f"{broken / 'model.safetensors'}: {broken_checkpoint.LINE}"
    check_ends_in_one_line(command, environment(), line)


# Endpoints that change, release or export weights, or a part of them, and what they are sent.
NAMED = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[128]]}
GROUP = {"master_address": "localhost", "group_name": "group"}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "update_weights_from_disk": {"model_path": "MODEL", "abort_all_requests": True},
    "update_weights_from_tensor": {"serialized_named_tensors": ["eA=="]},
    "update_weights_from_distributed": NAMED,
    "update_weights_from_ipc": {"zmq_handles": {}},
    "begin_weight_update": {},
    "end_weight_update": {},
    "init_weights_update_group": {**GROUP, "master_port": 1, "rank_offset": 0, "world_size": 1},
    "destroy_weights_update_group": {"group_name": "group"},
    "init_weights_send_group_for_remote_instance": {
        **GROUP,
        "ports": "1",
        "group_rank": 0,
        "world_size": 2,
    },
    "send_weights_to_remote_instance": {"master_address": "localhost", "ports": "1"},
    "release_memory_occupation": {},
    "resume_memory_occupation": {},
    "weights_checker": {"action": "reset_tensors"},
    "get_weights_by_name": {"name": "model.layers.0.mlp.experts.0.up_proj.weight"},
    "load_lora_adapter": {"lora_name": "adapter", "lora_path": "MODEL"},
    "load_lora_adapter_from_tensors": {
        "lora_name": "adapter",
        "config_dict": {},
        "serialized_named_tensors": ["eA=="],
    },
    "unload_lora_adapter": {"lora_name": "adapter"},
}


def test_server(folder: Path, model: Path, prompts: list[list[int]], greedy: Greedy) -> None:
    """Options given as flags reach the worker; answers over HTTP are right, and stay so after
    requests that the hybrid layer cannot do."""
    port, stats, log = free_port(), folder / "stats.json", folder / "server.log"
    flags = ("--kt-method", "BF16", "--kt-num-gpu-experts", str(HOT), "--port", str(port))
    # As in the published commands of large models, for one rank.
    flags += ("--tp", "1", "--dp-size", "1", "--ep-size", "1", "--trust-remote-code")
    flags += ("--tool-call-parser", "kimi_k2", "--reasoning-parser", "kimi_k2")
    env = environment(KT_STATS_FILE=str(stats))
    with serving(serve(model, *flags), env, port, log) as url:
        sampling = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}

        def complete() -> list[list[int]]:
            found = post(f"{url}/generate", {"input_ids": prompts, "sampling_params": sampling})
            return [one["output_ids"] for one in found]

        tokens = complete()
        check_equal(greedy, {"tokens": tokens})
        check_counted(stats, log, prompts)
        for endpoint, body in ENDPOINTS.items():
            sent = {name: str(model) if value == "MODEL" else value for name, value in body.items()}
            status, said = answer_to(f"{url}/{endpoint}", sent)
            assert status == 400 and "kt-moe does not support" in said, (endpoint, status, said)
            assert '"success":false' in said or '"error":' in said, (endpoint, said)
        assert complete() == tokens


# ---- the demo model


@pytest.mark.parametrize("name", ["demo stock", "demo none hot", "demo some hot"])
def test_demo_model_tokens(
    name: str, answers: Answers, demo: tuple[dict[str, Any], Greedy]
) -> None:
    check_equal(demo[1], answers[name], share=0.5)
