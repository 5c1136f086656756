"""Measures, predicts, chooses, checks: what `kt tune` does, without printing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..runtime.gpu import gpu_memory
from ..runtime.machine import available_memory, usable_cores
from ..runtime.pools import plan_pools
from ..runtime.text import shown_size
from ..serving.class_check import from_hub
from ..serving.option_table import OptionError
from ..serving.server_process import ServerFailed
from ..serving.tuned import ENGINES_PART, Need
from .apart import Apart
from .arguments import ranks_of
from .batches import batch_tokens, captured_tokens
from .choice import Candidate, HotChoice, Limits, choose, predict
from .cpu import cpu_rates, host_rates
from .disturbance import Disturbances
from .engine import VOCABULARY, ServerPlan, serving
from .gpu import measure_gpu
from .model import Setting, TimeModel
from .plan import ENGINE_TAKES, Room, Tuned, hot_choices, methods_of, room_for
from .rates import CpuRates, GpuRates, HostRates
from .small_engine import engine_rates, server_environment
from .wishes import Say, Wishes, engine_of, share_of, with_memory

_HOST_KEEPS = 2 << 30  # bytes of memory that the engine takes on the host


@dataclass(frozen=True)
class Result:
    """What was measured and predicted.

    model: with all measured rates. room: of the GPU; None without one. candidates: with their
    predictions. chosen: the recommended one. server: how to start it. disturbed: what was measured
    while something else used the CPUs, and what did.
    """

    tuned: Tuned
    wishes: Wishes
    model: TimeModel
    cpus: tuple[CpuRates, ...]
    room: Room | None
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    server: ServerPlan
    installed: bool
    disturbed: dict[str, str]

    @property
    def several(self) -> bool:
        """Whether the model is served on several GPUs."""
        return ranks_of(self.server.engine, self.wishes.engine_arguments) > 1

    @property
    def streaming_takes(self) -> int:
        """Bytes of the GPU that are kept for streamed experts."""
        return self.tuned.streaming_takes(self.chosen.cpu.method, self.chosen.hot.count)

    @property
    def hot_options(self) -> dict[str, Any]:
        """The recommended options for hot experts, by name. Their number is that of one GPU, so of
        several, each gets as much memory for them as one would."""
        hot = self.chosen.hot
        if self.room is None:
            return {}
        found: dict[str, Any] = {"num_gpu_experts": hot.count}
        if hot.count and self.several:
            found = {"gpu_experts_memory": shown_size(hot.gpu_bytes, down=True)}
        if hot.count and hot.format != "auto":
            found["hot_format"] = hot.format
        return found

    @property
    def options(self) -> dict[str, Any]:
        """The recommended options that are saved, by name: those that differ from what kt-moe does
        by itself."""
        one = self.chosen
        found = {} if self.several else self.hot_options
        if one.cpu.method != self.tuned.method:
            found["method"] = one.cpu.method
        if one.cpu.threads is not None:
            found["cpuinfer"] = one.cpu.threads
        if one.deferred:
            found["max_deferred_experts_per_token"] = one.deferred
        return found

    @property
    def need(self) -> Need | None:
        """Of the hot experts; None if there are none."""
        device = self.model.device
        hot = self.options.get("num_gpu_experts")
        if self.room is None or not hot or isinstance(device, HostRates):
            return None
        fixed = self.room.weights + self.chosen.hot.gpu_bytes
        if self.server.engine == "vllm":  # SGLang's share does not include it
            fixed += ENGINE_TAKES
        return Need(
            self.server.engine,
            self.chosen.cpu.method,
            device.total,
            int(fixed),
            self.tuned.shape.kv_bytes,
            self.wishes.context,
        )


def tune(tuned: Tuned, wishes: Wishes, say: Say) -> Result:
    """Measures this machine for a model, and chooses options.

    Raises:
        ValueError: the model does not fit, or wishes contradict it.
    """
    measured, accepted = methods_of(tuned, wishes.methods)
    shape, engine, installed = tuned.shape, *engine_of(wishes)
    room, disturbances = None, Disturbances()
    with Apart() as apart:
        measure = partial(disturbances.measure, apart)
        if torch.cuda.is_available():
            gpu = apart(gpu_memory)
            wishes = with_memory(wishes, gpu, say)
            memory = wishes.gpu_memory or ENGINES_PART * gpu.total
            room = room_for(shape, memory, wishes.context, wishes.goal.streams)
        hots: dict[str, list[HotChoice]] = {}
        for method in measured:
            try:
                hots[method] = hot_choices(
                    tuned, engine, method, room, wishes.hot_format, wishes.statistics
                )
            except OptionError:  # a method without such hot experts
                if method in accepted:
                    raise
        say(
            f"{tuned.model}: {len(shape.moe_layers)} layers with {shape.experts} experts of "
            f"{shape.hidden} x {shape.inter}, {shape.top_k} per token; method {tuned.method}"
        )
        device: GpuRates | HostRates
        if room is None:
            device = HostRates(*measure("memory", host_rates))
        else:
            say("measuring the GPU and the bus")
            device = measure("the GPU", measure_gpu, shape, torch.device("cuda", 0))
        cpus = tuple(_cpus(tuned, tuple(hots), accepted, room is not None, measure, say))
    rates = engine_rates(tuned, wishes, engine, installed, device, disturbances, say)
    batch = batch_tokens(engine, device, wishes.engine_arguments)
    captured = captured_tokens(engine, device, wishes.goal.streams, batch, wishes.engine_arguments)
    model = TimeModel(shape, device, rates, wishes.context, batch, captured)
    limits = Limits(max(available_memory() - _HOST_KEEPS, 0), accepted, wishes.deferral)
    candidates: list[Candidate] = []
    for method in hots:
        candidates += predict(
            model,
            [cpu for cpu in cpus if cpu.method == method],
            hots[method],
            _deferrals(shape.top_k, wishes.deferral, room),
            wishes.goal,
            limits,
            tuned.may_stream(method),
        )
    chosen = choose(candidates, limits)
    result = Result(
        tuned,
        wishes,
        model,
        cpus,
        room,
        tuple(candidates),
        chosen,
        ServerPlan(
            engine,
            tuned.path,
            wishes.context,
            wishes.goal.streams,
            "cpu" if room is None else "cuda",
            memory=share_of(wishes, device, engine),
            more=wishes.engine_arguments,
        ),
        installed,
        disturbances.found,
    )
    shown = result.hot_options | result.options
    if wishes.statistics is not None and chosen.hot.count:
        shown["expert_stats"] = wishes.statistics
    if not shown:  # the plugin is turned on by any option
        shown = {"num_gpu_experts": 0}
    return replace(result, server=replace(result.server, model=tuned.model, options=shown))


@dataclass(frozen=True)
class Check:
    """The times of a server with the recommended options. decode: seconds of a step with the goal's
    streams. prefill: seconds to the first token of the goal's prompt. *_predicted: the same.
    disturbed: by what, or None."""

    decode: float
    prefill: float
    decode_predicted: float
    prefill_predicted: float
    disturbed: str | None = None

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted times over measured ones, minus 1."""
        return (
            self.decode_predicted / self.decode - 1,
            self.prefill_predicted / self.prefill - 1,
        )


def check(result: Result, say: Say) -> Check:
    """Serves the model with the recommended options, and times it.

    Raises:
        ServerFailed: the model cannot be downloaded, or the server does not start; with the reason.
    """
    _download(result.tuned, say)
    wishes, goal = result.wishes, result.wishes.goal
    context = min(128, wishes.context // 2)
    setting, disturbances = _setting_of(result), Disturbances()
    with tempfile.TemporaryDirectory(prefix="kt-tune-") as folder:
        say("checking it with a short run of the engine")
        log = Path(folder) / "log"
        with (
            serving(result.server, VOCABULARY, log, server_environment(), say) as server,
            disturbances.during("check", server.cpu_times),
        ):
            first = server.prefill(goal.prompt)
            steps = max(1, min(48, wishes.context - context - 1))
            step = server.decode(goal.streams, context, steps)
    short = replace(result.model, context=context)
    return Check(
        step,
        first,
        short.decode(setting, goal.streams),
        short.prefill(setting, goal.prompt),
        disturbances.found.get("check"),
    )


def _download(tuned: Tuned, say: Say) -> None:
    """Downloads the weights that are not there. The server would do it as well, within the time
    that it has for its start."""
    if not tuned.absent:
        return
    size = shown_size(tuned.absent)
    say(f"downloading the weights of {tuned.model} for the check, {size}; --no-check avoids it")
    try:
        from_hub(tuned.model)
    except ValueError as problem:
        raise ServerFailed(str(problem)) from problem


def _setting_of(result: Result) -> Setting:
    one = result.chosen
    return Setting(one.hot.load, one.cpu, one.hot.expert_bytes, one.deferred, one.streaming)


def _cpus(
    tuned: Tuned,
    measured: Sequence[str],
    accepted: Sequence[str],
    gpu: bool,
    measure: Callable[..., CpuRates],
    say: Say,
) -> list[CpuRates]:
    """Every method with kt-moe's number of threads, and the accepted ones with others."""
    found = []
    for method in measured:
        form = tuned.form(method)
        default = plan_pools(None, None, None)
        counts = _thread_counts(sum(default.threads), gpu) if method in accepted else []
        for threads in (None, *counts):
            plan = default if threads is None else plan_pools(threads, None, None)
            what = f"{method}, threads {plan.describe()}"
            say(f"measuring the CPU: {what}")
            found.append(measure(what, cpu_rates, tuned.shape, method, form, plan, threads))
    return found


def _thread_counts(default: int, gpu: bool) -> list[int]:
    """Others to try: half and three quarters of the cores, and without a GPU all of them. Beside a
    GPU, the engine and the hand-over need the cores that the default leaves."""
    cores = usable_cores()
    counts = {max(1, cores // 2), max(1, cores * 3 // 4)} | (set() if gpu else {cores})
    return sorted(count for count in counts - {default} if not gpu or count < default)


def _deferrals(top_k: int, most: int, room: Room | None) -> tuple[int, ...]:
    if room is None:
        return (0,)
    return tuple(range(min(max(most, 2), top_k) + 1))
