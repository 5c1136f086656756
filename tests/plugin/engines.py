"""Shared by the tests of both engines: running them, stopping them, judging their tokens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import EXPERTS, GAP, LAYERS, STEPS, TOP_K, Greedy, Reference, agreement
from transformers import AutoConfig

import kt_kernel
from kt_kernel.routes.record import RouteRecord
from kt_kernel.routes.statistics import ExpertStatistics
from kt_kernel.runtime.variant import kernel_table
from kt_kernel.serving.model_config import routed_model
from kt_kernel.serving.server_process import (
    ServerFailed,
    end_group,
    local_http,
    process_group,
    wait_until_healthy,
)
from kt_kernel.testing import quantise_weights

HERE = Path(__file__).parent
DEMO_MODEL = Path(kt_kernel.__file__).parent / "demo_model"
HOT = 3
COLD = range(HOT, EXPERTS)
STREAMED_FROM = 16  # tokens, fewer than the prompts have, and more than are decoded at a time
SCATTERED = ((1, 4, 6), tuple(range(EXPERTS)), (5,), ())  # hot experts of each layer
TIMEOUT = 1800  # seconds for a test; the first one of a module waits for all runs of its engine

# Arguments of the engines on a GPU. The kernels are those that need no further packages. There is
# no prefix cache, because the layers do not count tokens that come from it.
GPU_VLLM = {
    "attention_backend": "TRITON_ATTN",
    "moe_backend": "triton",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
    "enable_prefix_caching": False,
}
GPU_SGLANG = {
    "device": "cuda",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "moe_runner_backend": "triton",
}
# Tokens from the cache, and those that SGLang's overlapped schedule computes in vain, are not
# counted.
SGLANG_COUNTED = {"disable_radix_cache": True, "disable_overlap_schedule": True}
NO_GRAPHS = {"disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True}

Answers = dict[str, dict[str, Any]]


def environment(**more: str) -> dict[str, str]:
    """The tests' environment without kt options, with Triton's compiler, and with what engines
    need."""
    ours = ("KT_", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"HF_HUB_OFFLINE": "1", **more}


def run(python: str, script: str, folder: Path, env: dict[str, str], **job: Any) -> Answers:
    """Runs a job of vllm_run.py or sglang_run.py in a new folder. Returns its answers by name."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    command = [python, HERE / script, folder / "job.json", folder / "result.json"]
    with process_group(command, folder / "log", env) as process:
        code = process.wait(TIMEOUT - 300)
    assert code == 0, (folder / "log").read_text()[-4000:]
    return {answer["name"]: answer for answer in json.loads((folder / "result.json").read_text())}


def check_hooks(python: str, script: str, env: dict[str, str], *arguments: str) -> None:
    """Runs a script of checks in an engine's environment. It must end with OK."""
    command = [python, HERE / script, *arguments]
    paths = env.get("PYTHONPATH"), str(HERE.parent)  # with what all tests share
    env = env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0 and done.stdout.strip().endswith("OK"), done.stdout + done.stderr


def check_equal(
    greedy: Greedy, answer: dict[str, Any], share: float = 0.9, gap: float = GAP, slips: int = 0
) -> None:
    """The tokens equal the reference's up to its ties. At least ``share`` of them must be compared.
    At most ``slips`` prompts may end with another token."""
    assert "error" not in answer, answer
    equal, checked, total = agreement(greedy, answer["tokens"], gap)
    assert checked - equal <= slips and checked >= share * total, (equal, checked, total)


def check_scattered(answers: Answers) -> None:
    """With the experts SCATTERED hot, the engine's answers equal those with the first ones hot, and
    those of the stock engine: kt-moe's BF16 kernels round their input once. One layer has all of
    its experts hot, and one has none."""
    scattered, stock = answers["scattered"], answers["stock"]
    assert scattered["tokens"] == answers["some hot"]["tokens"] == stock["tokens"]
    found, wanted = (torch.tensor(answer["logprobs"]) for answer in (scattered, stock))
    assert (found - wanted).abs().mean() < 0.02
    assert scattered["logprobs"] != answers["some hot"]["logprobs"]


def scattered_options(model: Path, folder: Path) -> dict[str, Any]:
    """Options that make the experts SCATTERED hot, and record what is served into the folder."""
    return {
        "method": "BF16",
        "num_gpu_experts": HOT,
        "expert_stats": str(scattered_statistics(model, folder / "scattered")),
        "record_kt_gpu_expert_distribution": str(folder / "recorded"),
        "record_kt_expert_routes": str(folder / "routes"),
    }


def check_recorded(folder: Path, calls: int, tokens: int) -> None:
    """The files of `scattered_options` have each token once, in every layer, and as many routes to
    cold experts as the CPU computed."""
    statistics = ExpertStatistics.load(folder / "recorded")
    record = RouteRecord.load(folder / "routes")
    assert statistics.layers == tuple(range(LAYERS))
    assert statistics.tokens.tolist() == [tokens] * LAYERS
    assert (statistics.counts.sum(axis=1) == tokens * TOP_K).all()
    assert np.array_equal(record.statistics().counts, statistics.counts)
    cold = sum(
        statistics.counts[layer, expert]
        for layer, hot in enumerate(SCATTERED)
        for expert in set(range(EXPERTS)) - set(hot)
    )
    assert cold == calls


def scattered_statistics(model: Path, path: Path) -> Path:
    """Statistics by which the experts SCATTERED are those used most; as many in all as with HOT."""
    assert sum(map(len, SCATTERED)) == LAYERS * HOT
    counts = np.ones((LAYERS, EXPERTS))
    for layer, hot in enumerate(SCATTERED):
        counts[layer, list(hot)] = 10 + layer
    config = AutoConfig.from_pretrained(model)
    ExpertStatistics(
        routed_model(config), tuple(range(LAYERS)), counts, np.full(LAYERS, 100.0)
    ).save(path)
    return path


def logprob_distances(
    name: str, answer: dict[str, Any], reference: Reference, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of all log-probabilities to the reference's on the engine's own text, with and
    without the cold experts. Also prints them."""
    assert "error" not in answer, answer
    found = torch.tensor([value for row in answer["logprobs"] for value in row])
    near = (reference.logprobs(prompts, answer["tokens"]) - found).abs()

    def zero(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        down.zero_()

    with reference.changed(zero, COLD):
        far = (reference.logprobs(prompts, answer["tokens"]) - found).abs()
    print(f"{name}: median {near.median():.4f} mean {near.mean():.4f} far {far.mean():.3f}")
    return near, far


def distances_from_stock(
    name: str,
    stock: dict[str, Any],
    answer: dict[str, Any],
    reference: Reference,
    prompts: list[list[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of log-probabilities to the stock engine's while the texts are the same; and, of
    the reference, with and without the cold experts. Also prints them."""
    assert "error" not in stock and "error" not in answer, (stock, answer)
    near = []
    for mine, theirs, a, b in zip(
        answer["logprobs"], stock["logprobs"], answer["tokens"], stock["tokens"], strict=True
    ):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        near += [abs(x - y) for x, y in zip(mine[:same], theirs[:same], strict=True)]

    def zero(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        down.zero_()

    plain = reference.logprobs(prompts, stock["tokens"])
    with reference.changed(zero, COLD):
        far = (reference.logprobs(prompts, stock["tokens"]) - plain).abs()
    assert len(near) > len(plain) / 2, "the texts differ too early"
    distances = torch.tensor(near)
    print(
        f"{name}: median {distances.median():.4f} mean {distances.mean():.4f} far {far.mean():.3f}"
    )
    return distances, far


def check_logprobs(
    name: str,
    answer: dict[str, Any],
    reference: Reference,
    prompts: list[list[int]],
    median: float,
    mean: float,
) -> float:
    """The log-probabilities are close to the reference's on the engine's own text, and far from the
    reference's without cold experts. Returns the mean distance."""
    near, far = logprob_distances(name, answer, reference, prompts)
    assert near.median() < median and near.mean() < mean
    assert far.mean() > 10 * near.mean()
    return float(near.mean())


def gpu_python(variable: str) -> str:
    """A python with a CUDA engine and this package. Skips the test if the variable is not set."""
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"{variable} is not set: a python with the engine for CUDA")
    return python


def check_refused(answer: dict[str, Any], line: str) -> None:
    assert "error" in answer, answer
    assert line in answer["error"], answer["error"]


def check_quantised_tokens(
    method: str, answer: dict[str, Any], reference: Reference, prompts: list[list[int]]
) -> None:
    """The method's tokens are those of transformers with the method's weights and roundings.

    AMX rounds the group formats' weights, scales included, to bf16, which the reference does not. A
    random model amplifies this, so only wider gaps count there, and two prompts may slip.
    """
    folded = method.startswith("INT4_G") and kernel_table() == "amx"
    with reference.computing(method, COLD):
        greedy = reference.greedy(prompts)
    if folded:
        check_equal(greedy, answer, share=0.4, gap=5 * GAP, slips=2)
    else:
        check_equal(greedy, answer, share=0.6)


def check_quantised_logprobs(
    method: str, answer: dict[str, Any], reference: Reference, prompts: list[list[int]]
) -> None:
    """transformers is close with the dequantised weights, and far with the source weights.

    Int8 activations cause the first distance. INT8 weights are so close to the source weights that
    the second distance shows nothing.
    """

    def dequantise(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        for weight in (gate_up, down):
            weight.copy_(quantise_weights(method, weight))

    found = torch.tensor(answer["logprobs"]).flatten()
    with reference.changed(dequantise, COLD):
        near = (reference.logprobs(prompts, answer["tokens"]) - found).abs()
    far = (reference.logprobs(prompts, answer["tokens"]) - found).abs()
    assert near.median() < 0.05 and near.mean() < 0.15, (near.median(), near.mean())
    if method != "AMXINT8":
        assert far.mean() > 4 * near.mean(), (far.mean(), near.mean())


# ---- The server.


# What the engines' server commands import before they parse their arguments.
IMPORTED = {
    "vllm.entrypoints.cli.main": (
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.openai.api_server",
    ),
    "sglang.launch_server": ("sglang.srt.entrypoints.http_server",),
}


@cache
def _warm(python: str, module: str, env: frozenset[tuple[str, str]]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, HERE / "warm.py", *IMPORTED[module]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(env),
        start_new_session=True,
    )


def run_warm(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of `PYTHON -m MODULE ARGUMENTS`, run in a fork of a process that has
    already imported the engine, which takes most of the time."""
    python, option, module, *arguments = command
    assert option == "-m"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        warm = _warm(python, module, frozenset(env.items()))
        request = {"module": module, "arguments": arguments, "log": str(log)}
        print(json.dumps(request), file=warm.stdin, flush=True)
        if not select.select([warm.stdout], [], [], 300)[0]:
            end_group(warm.pid)
            _warm.cache_clear()
            pytest.fail(f"{command} does not end: {log.read_text()[-4000:]}")
        answer = warm.stdout.readline()
        assert answer, "the warm process has ended"
        return int(answer), log.read_text()


def check_ends_in_one_line(command: list[str], env: dict[str, str], line: str) -> None:
    """The command fails, and its last line is the error; there is no traceback."""
    code, output = run_warm(command, env)
    assert code != 0
    assert "Traceback" not in output and "usage:" not in output, output
    assert output.strip().splitlines()[-1].startswith(f"kt: error: {line}"), output


@contextlib.contextmanager
def serving(command: list[str], env: dict[str, str], port: int, log: Path) -> Iterator[str]:
    """Runs the server inside; it answers at the yielded URL. Its processes are gone afterwards."""
    url = f"http://127.0.0.1:{port}"
    with process_group(command, log, env) as server:
        try:
            wait_until_healthy(server, url, timeout=600)
        except ServerFailed as problem:
            pytest.fail(f"{problem}: {log.read_text()[-4000:]}")
        yield url


def post(url: str, body: dict[str, Any]) -> Any:
    """Sends JSON and returns the JSON answer."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with local_http.open(request, timeout=120) as response:
        return json.load(response)


def answer_to(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of the server's answer to JSON, or to an empty request."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with local_http.open(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def check_counted(stats: Path, log: Path, prompts: list[list[int]]) -> None:
    """After the prompts were completed: the counters in KT_STATS_FILE, and the line in the log."""
    time.sleep(2)  # the counters are written twice a second
    (counted,) = json.loads(stats.read_text())["models"]
    assert counted["expert_calls"] > LAYERS * len(prompts) * STEPS / 2
    assert counted["layers"][0]["hot_experts"] == list(range(HOT))
    line = f"kt: {LAYERS} MoE layers, in each {HOT} experts hot on the device [0-2]"
    assert line in log.read_text()


# ---- The demo model.


def demo_job(steps: int = 32) -> tuple[dict[str, Any], Greedy]:
    """A job without its runs, and the reference's tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    texts = ["And God said, ", "The children of Israel ", "In those days "]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    greedy = Reference(DEMO_MODEL).greedy(prompts, steps=steps)
    return {"model": str(DEMO_MODEL), "prompts": prompts, "steps": steps}, greedy
