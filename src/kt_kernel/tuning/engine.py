"""Starts an engine's server and times it: its own part of a step, and whole configurations."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np

from ..runtime.machine import CpuTimes, cpu_times
from ..serving.option_table import find_option
from ..serving.server_process import (
    ServerFailed,
    cpu_seconds,
    free_port,
    local_http,
    process_group,
    wait_until_healthy,
)
from .arguments import MEMORY_FLAG, with_changes
from .rates import BATCH, EngineRates, rising

# Of vLLM 0.26.0 and SGLang 0.5.17 with 8 layers of Qwen3-30B-A3B's shape on one H200 with 16
# virtual CPUs of a Xeon, all experts on the GPU
# (benchmarks/results/2026-11-28-engine-*-h200.json). vLLM's prompts: those of 8,192 and of 32,768
# tokens in 2026-11-29-prompts-vllm-h200.json. SGLang's attention was not timed there.
USUAL = {
    "vllm": EngineRates("vllm", ((1, 1.8e-3), (16, 2.2e-3)), 1.9e-3, 0.43, attention=0.109),
    "sglang": EngineRates("sglang", ((1, 1.4e-3), (16, 2.0e-3)), 2.4e-3, 0.4),
}
_NAME = "tune"  # of the served model, and the key of its API
VOCABULARY = 256  # of prompts; every model has as many tokens
_START = 1800  # seconds for a server with large weights
_SAY = 60  # seconds between lines that say what is waited for
_ERROR = re.compile(r"\berror: |\w+(Error|Exception): ")
_NO_ERROR = re.compile(r"\b(DEBUG|INFO|WARNING) |See root cause")
_ROUNDS = 3
_SETTLING = 15  # seconds in which an engine's steps get shorter, at most
_SHORTER = 0.98  # times the shortest step so far: a step that is shorter
_ANSWER = 500  # bytes of an engine's refusal that are shown
# Tokens of a context that the longest prompt leaves free, for its answer and by the engine's rule:
# SGLang refuses prompts that leave six or less.
LEFT_FREE = {"vllm": 2, "sglang": 8}
LEAST_CONTEXT = 256  # tokens, with which `measure_engine` can be used
_HIDES = 0.8  # of a step: where the GPU takes so much, the host may take less
_LONGER = 1.3  # times a short prompt: what a long one takes if the GPU is the limit
_TWICE = 2  # times a prompt: a longer one that tells attention's part from the rest
_FASTER = 1.5  # times as much as the rest, that attention's part has to grow for that


@dataclass(frozen=True)
class ServerPlan:
    """How a model is served.

    Attributes:
        engine: vllm or sglang.
        model: folder or repository.
        context: most tokens of a request.
        streams: most requests at a time.
        device: cuda or cpu.
        options: kt options by name; None: without kt-moe.
        memory: share of the GPU's memory that the engine may take; None: its own default.
        more: further arguments of the engine.
        overrides: changes of the configuration that make a small model of it, which gets random
            weights; None: the model itself.
    """

    engine: str
    model: str
    context: int
    streams: int
    device: str = "cuda"
    options: Mapping[str, Any] | None = None
    memory: float | None = None
    more: tuple[str, ...] = ()
    overrides: Mapping[str, Any] | None = None

    def shown(self) -> str:
        """The command as a user would type it."""
        program = ["vllm", "serve"]
        if self.engine == "sglang":
            program = ["python", "-m", "sglang.launch_server"]
        return shlex.join([*program, *self._arguments(), *self.more])

    def command(self, port: int) -> list[str]:
        """The command through this interpreter."""
        serve = ["vllm.entrypoints.cli.main", "serve"]
        if self.engine == "sglang":
            serve = ["sglang.launch_server"]
        # What an earlier kt tune saved is not what is measured.
        own = [] if self.options is None else [find_option("tuned").flag, "off"]
        # Behind the user's, which they replace.
        place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", _NAME]
        place += ["--api-key", _NAME]
        more = list(self.more)
        if self.engine == "sglang" and self.device == "cpu":
            more += ["--device", "cpu", "--attention-backend", "torch_native"]
        if self.overrides is not None:
            # The user's changes may be what makes the context possible.
            more = with_changes(self.engine, more, self.overrides) + ["--load-format", "dummy"]
        return [sys.executable, "-m", *serve, *self._arguments(), *more, *own, *place]

    def _arguments(self) -> list[str]:
        context, streams = str(self.context), str(self.streams)
        if self.engine == "vllm":
            found = [self.model, "--max-model-len", context, "--max-num-seqs", streams]
        else:
            found = ["--model-path", self.model, "--context-length", context]
            found += ["--max-running-requests", streams]
        if self.memory is not None:
            found += [MEMORY_FLAG[self.engine], f"{self.memory:.3f}"]
        for name, value in (self.options or {}).items():
            found += [find_option(name).flag, str(value)]
        return found


class Server:
    """A server that answers.

    vocabulary: ids below it are tokens. group: of its processes.
    """

    def __init__(self, url: str, vocabulary: int, group: int) -> None:
        self._url, self._vocabulary, self._group = url, vocabulary, group
        self._choose = random.Random(0)

    def cpu_times(self) -> CpuTimes:
        """The times until now; those of the server's processes count as this process's own."""
        now = cpu_times()
        return replace(now, own=now.own + cpu_seconds(self._group))

    def prefill(self, tokens: int) -> float:
        """Seconds to the first token of a prompt."""
        self._seconds(1, tokens, 1)
        return min(self._seconds(1, tokens, 1) for _ in range(_ROUNDS))

    def decode(self, streams: int, context: int, steps: int = 48) -> float:
        """Seconds of a decode step."""
        self._seconds(streams, context, min(8, steps))
        times = []
        for _ in range(_ROUNDS):
            first = self._seconds(streams, context, 1)
            times.append((self._seconds(streams, context, steps + 1) - first) / steps)
        return sorted(times)[_ROUNDS // 2]

    def _seconds(self, count: int, tokens: int, steps: int) -> float:
        """Of so many requests at once. The prompts are new, so no prefix is cached."""
        prompts = [
            [self._choose.randrange(3, self._vocabulary) for _ in range(tokens)]
            for _ in range(count)
        ]
        begin = time.perf_counter()
        threads = ThreadPoolExecutor(count)
        try:
            list(threads.map(lambda prompt: self._complete(prompt, steps), prompts))
        finally:  # without waiting: an interrupt ends the server, and with it the requests
            threads.shutdown(wait=False, cancel_futures=True)
        return time.perf_counter() - begin

    def _complete(self, prompt: Sequence[int], steps: int) -> None:
        # Sampled tokens: greedy ones may repeat, and with them their experts.
        body = {
            "model": _NAME,
            "prompt": list(prompt),
            "max_tokens": steps,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {_NAME}"},
        )
        try:
            with local_http.open(request, timeout=600) as response:
                json.load(response)
        except HTTPError as refused:  # the answer says why
            answer = " ".join(refused.read(_ANSWER).decode(errors="replace").split())
            raise OSError(f"{refused}: {answer}") from None


@contextmanager
def serving(
    plan: ServerPlan,
    vocabulary: int,
    log: Path,
    environment: Mapping[str, str],
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Server]:
    """Starts a server; it runs while the block does. say: gets a line for each minute of waiting.

    Raises ServerFailed if it does not start, or if a request fails. Its log is then kept, and the
    message names it.
    """
    port, said = free_port(), [0.0]

    def waiting(seconds: float) -> None:
        if seconds >= said[0] + _SAY:
            said[0] = seconds
            say(f"waiting for {plan.engine} for {seconds:.0f} s; its log is {log}")

    with process_group(plan.command(port), log, environment) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_healthy(process, url, _START, waiting)
            yield Server(url, vocabulary, process.pid)
        except (ServerFailed, OSError, HTTPException) as problem:  # the latter ones of requests
            lines = log.read_text(errors="replace").splitlines()
            kept = Path(tempfile.gettempdir()) / f"kt-tune-{plan.engine}-{os.getpid()}.log"
            shutil.copyfile(log, kept)
            raise ServerFailed(f"{problem}: {_reason(lines)}; its log is {kept}") from None


def _reason(lines: Sequence[str]) -> str:
    """The line of a log that says why a server ended. Engines report the error of their first
    process once more, without its text."""
    errors = [line for line in lines if _ERROR.search(line) and not _NO_ERROR.search(line)]
    return " ".join((errors or list(lines) or ["no output"])[-1].split())


def _settle(server: Server) -> None:
    """Decodes until steps no longer get shorter: for some seconds, an engine's first ones do."""
    best, longer, end = math.inf, 0, time.monotonic() + _SETTLING
    while longer < _ROUNDS and time.monotonic() < end:
        step = server.decode(1, 32)
        longer = longer + 1 if step > _SHORTER * best else 0
        best = min(best, step)


def measure_engine(
    engine: str,
    server: Server,
    layers: int,
    operations: Callable[[int], tuple[float, float]],
    gpu_flops: float,
    gpu_step: Callable[[int], float],
    longest: int,
    batch: int = BATCH,
) -> EngineRates:
    """The engine's own part, from a model with few layers and all experts on the GPU.

    With so few layers, the host takes longer than the GPU, except for long prompts and for many
    streams of large experts.

    Args:
        layers: of the served model.
        operations: of a layer for a prompt of so many tokens: without attention's, and attention's.
        gpu_flops: see `GpuRates`.
        gpu_step: seconds of the GPU for a decode step of so many streams.
        longest: tokens of the longest prompt to try; the server's context is larger.
        batch: tokens of the engine's largest batch. The host prepares each batch of a prompt.
    """
    _settle(server)
    times = [(n, server.decode(n, 32)) for n in (1, 4, 16)]
    # What the host takes does not show where the GPU takes about as long.
    step = rising([(n, t) for n, t in times if gpu_step(n) < _HIDES * t] or times[:1])
    host = step[0][1]
    # The host prepares a prompt as it prepares a step, and then launches its layers.
    short = max(server.prefill(min(128, longest, batch)) - host, 0.0)
    usual = EngineRates(engine, step, short / layers, USUAL[engine].share, measured=True)
    first = min(longest, BATCH)
    batches = -(-first // batch)
    long = server.prefill(first) - batches * host
    if long <= _LONGER * batches * short:
        return usual
    work = layers * np.array(operations(first)) / gpu_flops
    whole = replace(usual, share=min(float(work.sum()) / long, 1.0))
    more = layers * np.array(operations(longest)) / gpu_flops
    # Two prompts tell what everything else and what attention takes, if the latter grows faster:
    # full attention does, with the square. Otherwise small errors of the times would decide.
    if longest < _TWICE * first or more[1] * work[0] < _FASTER * work[1] * more[0] or not work[1]:
        return whole
    batches = -(-longest // batch)
    longer = server.prefill(longest) - batches * host
    others, attention = np.linalg.solve(np.array([work, more]), np.array([long, longer]))
    if min(others, attention) < 1:  # faster than the GPU: the times contradict each other
        return whole
    return replace(whole, share=1 / float(others), attention=1 / float(attention))
