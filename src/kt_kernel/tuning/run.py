"""Measures, predicts, chooses, checks: what `kt tune` does, without printing."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..runtime.machine import available_memory, usable_cores
from ..runtime.pools import plan_pools
from ..runtime.text import shown_size
from ..serving.class_check import ENGINES
from ..serving.option_table import OptionError
from ..serving.server_process import ServerFailed
from ..serving.small_multimodal import text_path
from ..serving.tuned import Need
from .choice import Candidate, Goal, HotChoice, Limits, choose, predict
from .cpu import CpuBench, host_rates
from .engine import LEAST_CONTEXT, USUAL, Server, ServerPlan, measure_engine, serving
from .gpu import measure_gpu
from .model import Load, Setting, TimeModel
from .plan import ENGINE_TAKES, Room, Tuned, hot_choices, methods_of, room_for
from .rates import CpuRates, EngineRates, GpuRates, HostRates
from .shape import Shape, context_limit

_MEMORY_PART = 0.9  # of the GPU, by default
_FREE_PART = 0.95  # of what other programs leave of it
# Arguments of engines that may change how long a context the model can have.
_CHANGES_LIMIT = "--hf-overrides", "--json-model-override-args"
_LONGEST = 8192  # tokens of the context by which an engine is measured
_LAYERS = 8  # with experts, by which an engine is measured
_HOST_KEEPS = 2 << 30  # bytes of memory that the engine takes on the host
_VOCABULARY = 256  # of prompts; every model has as many tokens

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wishes:
    """What the user asks for.

    Attributes:
        goal: what is to be fast.
        context: most tokens of a request.
        engine: vllm or sglang; None: the one that is installed, if any.
        gpu_memory: bytes that the engine may take; None: nine tenths of the GPU.
        methods: accepted methods; none: the one that `auto` selects.
        deferral: most deferred experts per token.
        hot_format: of --kt-hot-format.
        statistics: a file of --record-kt-gpu-expert-distribution, or None.
        measure_engine: whether the engine is started to measure its own part.
        engine_arguments: of the engine's server, in addition.
    """

    goal: Goal
    context: int = 8192
    engine: str | None = None
    gpu_memory: int | None = None
    methods: tuple[str, ...] = ()
    deferral: int = 0
    hot_format: str = "auto"
    statistics: str | None = None
    measure_engine: bool = True
    engine_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What was measured and predicted.

    model: with all measured rates. room: of the GPU; None without one. candidates: with their
    predictions. chosen: the recommended one. server: how to start it.
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

    @property
    def options(self) -> dict[str, Any]:
        """The recommended options by name: those that differ from what kt-moe does by itself."""
        one = self.chosen
        found: dict[str, Any] = {}
        if self.room is not None:
            found["num_gpu_experts"] = one.hot.count
        if one.hot.format != "auto" and one.hot.count:
            found["hot_format"] = one.hot.format
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
        if self.room is None or not self.chosen.hot.count or isinstance(device, HostRates):
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


def with_lengths(wishes: Wishes, tuned: Tuned, context: int | None, prompt: int | None) -> Wishes:
    """The wishes with a context and a prompt: the given ones, or those that suit the model.

    Raises:
        ValueError: the model is not made for so long a context, or the prompt is longer than it.
    """
    most = context_limit(tuned.config)
    changed = any(word.startswith(_CHANGES_LIMIT) for word in wishes.engine_arguments)
    if context is None:
        context = _LONGEST if most is None else min(_LONGEST, most)
    elif most is not None and context > most and not changed:
        raise ValueError(
            f"--context {context}: {tuned.model} has been made for at most {most} tokens; give "
            f'fewer, or change that with --engine-args "{" or ".join(_CHANGES_LIMIT)} ..."'
        )
    if prompt is None:
        prompt = min(wishes.goal.prompt, context - 2)
    if prompt + 2 > context:
        raise ValueError(f"--prompt {prompt}: with --context {context}, at most {context - 2}")
    return replace(wishes, context=context, goal=replace(wishes.goal, prompt=prompt))


def _with_memory(wishes: Wishes, say: Say) -> Wishes:
    """The wishes with as much of the GPU as other programs leave, if that is less than the engine
    would take.

    Raises:
        ValueError: the user wants more.
    """
    free, total = torch.cuda.mem_get_info(_device())
    left = f"the GPU has {shown_size(total)}, of which {shown_size(free)} are free"
    if wishes.gpu_memory is not None and wishes.gpu_memory > free:
        raise ValueError(f"--gpu-memory {shown_size(wishes.gpu_memory)}: {left}")
    if wishes.gpu_memory is not None or free >= _MEMORY_PART * total:
        return wishes
    say(f"{left}: other programs use it, and the engine is to take what they leave")
    # What is free may become a little less until the engine starts.
    return replace(wishes, gpu_memory=int(_FREE_PART * free))


def tune(tuned: Tuned, wishes: Wishes, say: Say) -> Result:
    """Measures this machine for a model, and chooses options.

    Raises:
        ValueError: the model does not fit, or wishes contradict it.
    """
    measured, accepted = methods_of(tuned, wishes.methods)
    shape, engine, installed = tuned.shape, *_engine_of(wishes)
    room = None
    if torch.cuda.is_available():
        wishes = _with_memory(wishes, say)
        total = torch.cuda.mem_get_info(_device())[1]
        memory = wishes.gpu_memory or _MEMORY_PART * total
        room = room_for(shape, memory, wishes.context, wishes.goal.streams)
    hots: dict[str, list[HotChoice]] = {}
    for method in measured:
        try:
            hots[method] = hot_choices(tuned, method, room, wishes.hot_format, wishes.statistics)
        except OptionError:  # a method without such hot experts
            if method in accepted:
                raise
    say(
        f"{tuned.model}: {len(shape.moe_layers)} layers with {shape.experts} experts of "
        f"{shape.hidden} x {shape.inter}, {shape.top_k} per token; method {tuned.method}"
    )
    device: GpuRates | HostRates
    if room is None:
        device = HostRates(*host_rates())
    else:
        say("measuring the GPU and the bus")
        try:
            device = measure_gpu(shape, _device())
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(_device())
            raise ValueError(
                f"the GPU has {shown_size(free)} of {shown_size(total)} free, too little to "
                "measure it; end what else uses it"
            ) from error
        torch.cuda.empty_cache()
    cpus = tuple(_cpus(tuned, tuple(hots), accepted, isinstance(device, GpuRates), say))
    rates = _engine_rates(tuned, wishes, engine, installed, device, say)
    model = TimeModel(shape, device, rates, wishes.context)
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
            memory=_share(wishes, device, engine),
            more=wishes.engine_arguments,
        ),
        installed,
    )
    shown = result.options
    if wishes.statistics is not None and chosen.hot.count:
        shown = shown | {"expert_stats": wishes.statistics}
    if not shown:  # the plugin is turned on by any option
        shown = {"num_gpu_experts": 0}
    return replace(result, server=replace(result.server, model=tuned.model, options=shown))


@dataclass(frozen=True)
class Check:
    """The times of a server with the recommended options. decode: seconds of a step with the goal's
    streams. prefill: seconds to the first token of the goal's prompt. *_predicted: the same."""

    decode: float
    prefill: float
    decode_predicted: float
    prefill_predicted: float

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
        ServerFailed: the server does not start; with the reason.
    """
    wishes, goal = result.wishes, result.wishes.goal
    prompt = min(goal.prompt, wishes.context - 2)
    context = min(128, wishes.context // 2)
    setting = _setting_of(result)
    with tempfile.TemporaryDirectory(prefix="kt-tune-") as folder:
        say("checking it with a short run of the engine")
        log = Path(folder) / "log"
        with serving(result.server, _VOCABULARY, log, _environment()) as server:
            first = server.prefill(prompt)
            steps = max(1, min(48, wishes.context - context - 1))
            step = server.decode(goal.streams, context, steps)
    short = replace(result.model, context=context)
    return Check(step, first, short.decode(setting, goal.streams), short.prefill(setting, prompt))


def _setting_of(result: Result) -> Setting:
    one = result.chosen
    return Setting(one.hot.load, one.cpu, one.hot.expert_bytes, one.deferred, one.streaming)


def _share(wishes: Wishes, device: GpuRates | HostRates, engine: str) -> float | None:
    """The share of the GPU that the engine is told to take; None if the user did not say. SGLang's
    does not include what it takes while computing."""
    if wishes.gpu_memory is None or isinstance(device, HostRates):
        return None
    return (wishes.gpu_memory - (ENGINE_TAKES if engine == "sglang" else 0)) / device.total


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _engine_of(wishes: Wishes) -> tuple[str, bool]:
    """The engine, and whether it is installed.

    Raises ValueError if it is unknown.
    """
    if wishes.engine is not None and wishes.engine not in ENGINES:
        raise ValueError(
            f"--engine {wishes.engine}: unknown engine; accepted: {', '.join(ENGINES)}"
        )
    for engine in ENGINES if wishes.engine is None else (wishes.engine,):
        if importlib.util.find_spec(engine) is not None:
            return engine, True
    return wishes.engine or ENGINES[0], False


def _cpus(
    tuned: Tuned, measured: Sequence[str], accepted: Sequence[str], gpu: bool, say: Say
) -> list[CpuRates]:
    """Every method with kt-moe's number of threads, and the accepted ones with others."""
    found = []
    for method in measured:
        form = tuned.form(method)
        default = plan_pools(None, None, None)
        counts = _thread_counts(sum(default.threads), gpu) if method in accepted else []
        for threads in (None, *counts):
            plan = default if threads is None else plan_pools(threads, None, None)
            say(f"measuring the CPU: {method}, threads {plan.describe()}")
            found.append(CpuBench(tuned.shape, method, form, plan, threads).rates())
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


def _engine_rates(
    tuned: Tuned,
    wishes: Wishes,
    engine: str,
    installed: bool,
    device: GpuRates | HostRates,
    say: Say,
) -> EngineRates:
    """Measured with a small model of the same layers and random weights, or the usual ones."""
    usual, shape = USUAL[engine], tuned.shape
    if not (installed and wishes.measure_engine and isinstance(device, GpuRates)):
        return usual
    if text_path(vars(tuned.config)):
        say(f"{engine} is not measured, because the model is multimodal; its usual times are taken")
        return usual
    part = small_shape(shape, wishes.gpu_memory or _MEMORY_PART * device.total)
    context = min(_LONGEST, wishes.context)
    if context < LEAST_CONTEXT:
        say(f"{engine} is not measured with so short a context; its usual times are taken")
        return usual
    more = wishes.engine_arguments
    memory = _share(wishes, device, engine)
    plan = ServerPlan(engine, tuned.path, context, 16, memory=memory, layers=part.layers, more=more)
    say(f"measuring {engine} with {part.layers} layers of the model, random weights")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kt-tune-") as folder,
            serving(plan, _VOCABULARY, Path(folder) / "log", _environment()) as server,
        ):
            return measure_small(engine, server, part, device, context - 2)
    except ServerFailed as problem:
        say(f"{engine} could not be measured ({problem}); its usual times are taken")
        return usual


def small_shape(shape: Shape, memory: float) -> Shape:
    """The first layers of a model: those without experts, and as many with experts as fit into half
    of the memory, but at least two and at most eight."""
    expert = shape.expert_weights * shape.value_bytes * shape.experts
    count = min(max(int(memory / 2 / expert), 2), _LAYERS)
    layers = min(shape.moe_layers[0] + count, shape.layers)
    return replace(
        shape,
        layers=layers,
        moe_layers=tuple(layer for layer in shape.moe_layers if layer < layers),
        layer_bytes=shape.layer_bytes * layers // shape.layers,
        kv_bytes=shape.kv_bytes * layers // shape.layers,
    )


def measure_small(
    engine: str, server: Server, part: Shape, device: GpuRates, longest: int
) -> EngineRates:
    """See `measure_engine`. part: of the served model, all of whose experts are on the GPU."""
    model = TimeModel(part, device, USUAL[engine], context=64)
    nothing = CpuRates("", None, 0, ((1, 0.0),), ((1, 0.0),))
    hot = Setting(Load.uniform(part, part.experts), nothing, part.expert_weights * part.value_bytes)
    return measure_engine(
        engine,
        server,
        part.layers,
        model.layer_operations,
        device.flops,
        lambda streams: model.device_step(hot, streams),
        longest,
    )


def _environment() -> dict[str, str]:
    """Of servers: only the options of their command count."""
    ours = "KT_CONFIG", "KT_STATS_FILE", "KT_TRACE"
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
