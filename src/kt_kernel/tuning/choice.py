"""Predicts all candidates, and chooses the one that serves a request soonest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..runtime.text import shown_size
from .model import Load, Setting, TimeModel
from .rates import CpuRates

STREAMS = (1, 4, 16)
PROMPTS = (2048, 8192)
_SAME = 0.97  # of the best time: a simpler candidate is chosen


@dataclass(frozen=True)
class Goal:
    """What is to be fast: requests of a prompt and an answer, of which as many run at a time."""

    prompt: int = 2048
    answer: int = 256
    streams: int = 1


@dataclass(frozen=True)
class HotChoice:
    """How many experts are hot. load: uniform, or by statistics. format: of --kt-hot-format.
    expert_bytes: of one on the GPU. gpu_bytes: of all of them."""

    count: int
    load: Load
    format: str
    expert_bytes: float
    gpu_bytes: float


@dataclass(frozen=True)
class Candidate:
    """Options and their predicted speed.

    Attributes:
        cpu: method and threads.
        hot: hot experts.
        deferred: experts per token.
        streaming: tokens from which experts are streamed, as the server will measure it; None:
            never.
        decode: tokens per second of all streams, by streams.
        prefill: seconds to the first token, by tokens of the prompt.
        seconds: of the goal's requests, from the first prompt to the last token.
        cpu_bytes: of the packed cold experts.
        allowed: "" if it may be chosen, or why not.
    """

    cpu: CpuRates
    hot: HotChoice
    deferred: int
    streaming: int | None
    decode: Mapping[int, float]
    prefill: Mapping[int, float]
    seconds: float
    cpu_bytes: float
    allowed: str = field(default="", compare=False)


@dataclass(frozen=True)
class Limits:
    """What a candidate may take.

    Attributes:
        memory: bytes for packed cold experts.
        methods: methods that the user accepts.
        deferred: most deferred experts per token.
    """

    memory: float
    methods: tuple[str, ...]
    deferred: int


def predict(
    model: TimeModel,
    cpus: Iterable[CpuRates],
    hots: Sequence[HotChoice],
    deferred: Sequence[int],
    goal: Goal,
    limits: Limits,
    streams: bool = True,
) -> list[Candidate]:
    """All combinations, with their predicted speed. streams: whether a server of the model streams
    experts at all."""
    found = []
    shape = model.shape
    for cpu in cpus:
        for hot in hots:
            cold = float((~hot.load.hot).sum(1) @ hot.load.layers)
            size = cold * cpu.expert_bytes
            setting = Setting(hot.load, cpu, hot.expert_bytes)
            begin = model.streaming_from(setting) if streams else None
            for d in deferred if cold else deferred[:1]:
                setting = Setting(hot.load, cpu, hot.expert_bytes, d, begin)
                step = model.decode(setting, goal.streams)
                first = model.prefill(setting, goal.prompt)
                why = ""
                if size > limits.memory:
                    why = "its cold experts do not fit into memory"
                elif cpu.method not in limits.methods:
                    why = "another method changes the results; --methods allows it"
                elif d > limits.deferred:
                    why = "deferral changes the results; --deferral allows it"
                found.append(
                    Candidate(
                        cpu,
                        hot,
                        d,
                        begin,
                        {n: model.tokens_per_second(setting, n) for n in STREAMS},
                        {n: model.prefill(setting, n) for n in PROMPTS},
                        goal.streams * first + goal.answer * step,
                        size,
                        why,
                    )
                )
    assert found, shape.name
    return found


def choose(candidates: Sequence[Candidate], limits: Limits, needed: str = "") -> Candidate:
    """The one whose requests are served soonest. Of those that take at most 3% longer, one without
    deferral, with kt-moe's own number of threads, and with the most hot experts.

    Raises:
        ValueError: none fits into memory.
    """
    allowed = [one for one in candidates if not one.allowed]
    if not allowed:
        least = min(
            (one for one in candidates if one.cpu.method in limits.methods),
            key=lambda one: one.cpu_bytes,
        )
        raise ValueError(
            f"the cold experts take {shown_size(least.cpu_bytes)} of memory in "
            f"{least.cpu.method} with {least.hot.count} hot experts per layer, and "
            f"{shown_size(limits.memory, down=True)} are available{needed}"
        )
    best = min(one.seconds for one in allowed)
    near = [one for one in allowed if one.seconds * _SAME <= best]
    return min(
        near,
        key=lambda one: (one.deferred, one.cpu.threads is not None, -one.hot.count, one.seconds),
    )
