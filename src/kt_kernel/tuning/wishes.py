"""What a user asks of `kt tune`, completed by what the model and the machine have."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..runtime.gpu import GpuMemory
from ..runtime.text import shown_size
from ..serving.class_check import ENGINES
from ..serving.tuned import ENGINES_PART
from .arguments import MEMORY_FLAG, changes_of, check_arguments, value_of
from .choice import Goal
from .context import context_limit, how_to_allow, leave_unknown
from .engine import LEFT_FREE
from .plan import ENGINE_TAKES, Tuned
from .rates import GpuRates, HostRates

LONGEST = 8192  # tokens of a context, by default
_FREE_PART = 0.95  # of what other programs leave of the GPU

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


def engine_of(wishes: Wishes) -> tuple[str, bool]:
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


def with_lengths(
    wishes: Wishes, tuned: Tuned, context: int | None, prompt: int | None, answer: int | None
) -> Wishes:
    """The wishes with a context, a prompt and an answer: the given ones, or those that suit the
    model.

    Raises:
        ValueError: the engine is unknown, it refuses so long a context, the prompt or the answer is
            longer than the context, or an argument of the engine contradicts the wishes.
    """
    engine, _ = engine_of(wishes)
    check_arguments(engine, wishes.engine_arguments)
    limit = None
    if not leave_unknown(changes_of(engine, wishes.engine_arguments)):
        limit = context_limit(tuned.config, engine)
    if context is None:
        context = LONGEST if limit is None else min(LONGEST, limit[0])
    elif limit is not None and context > limit[0]:
        raise ValueError(
            f"--context {context}: {engine} serves {tuned.model} with at most {limit[0]} tokens "
            f"(its configuration: {limit[1]}); {how_to_allow(engine)}"
        )
    longest = context - LEFT_FREE[engine]
    if prompt is None:
        prompt = min(wishes.goal.prompt, longest)
    if prompt > longest:
        raise ValueError(f"--prompt {prompt}: with --context {context}, at most {longest}")
    if answer is None:
        answer = min(wishes.goal.answer, context - 1)
    if answer >= context:
        raise ValueError(f"--answer {answer}: with --context {context}, at most {context - 1}")
    goal = replace(wishes.goal, prompt=prompt, answer=answer)
    return replace(wishes, context=context, goal=goal)


def with_memory(wishes: Wishes, memory: GpuMemory, say: Say) -> Wishes:
    """The wishes with as much of the GPU as other programs leave, if that is less than the engine
    would take.

    Raises:
        ValueError: the user wants more, or says it by an argument of the engine.
    """
    flag = MEMORY_FLAG[engine_of(wishes)[0]]
    if value := value_of(wishes.engine_arguments, flag):
        raise ValueError(
            f"--engine-args {flag} {value}: with a GPU, give --gpu-memory in its place"
        )
    has, left = (shown_size(size, down=True) for size in (memory.total, memory.free))
    left = f"the GPU has {has}, of which {left} are free"
    if wishes.gpu_memory is not None and wishes.gpu_memory > memory.free:
        raise ValueError(f"--gpu-memory {shown_size(wishes.gpu_memory)}: {left}")
    if wishes.gpu_memory is not None or memory.free >= ENGINES_PART * memory.total:
        return wishes
    say(f"{left}: other programs use it, and the engine is to take what they leave")
    # What is free may become a little less until the engine starts.
    return replace(wishes, gpu_memory=int(_FREE_PART * memory.free))


def share_of(wishes: Wishes, rates: GpuRates | HostRates, engine: str) -> float | None:
    """The share of the GPU that the engine is told to take; None if the user did not say. SGLang's
    does not include what it takes while computing."""
    if wishes.gpu_memory is None or isinstance(rates, HostRates):
        return None
    return (wishes.gpu_memory - (ENGINE_TAKES if engine == "sglang" else 0)) / rates.total
