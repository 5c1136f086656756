"""What a user asks of `kt tune`, completed by what the model and the machine have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..runtime.text import shown_size
from .choice import Goal
from .plan import ENGINE_TAKES, Tuned
from .rates import GpuRates, HostRates
from .shape import context_limit

MEMORY_PART = 0.9  # of the GPU, by default
LONGEST = 8192  # tokens of a context, by default
_FREE_PART = 0.95  # of what other programs leave of the GPU
# Arguments of engines that may change how long a context the model can have.
_CHANGES_LIMIT = "--hf-overrides", "--json-model-override-args"

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


def with_lengths(wishes: Wishes, tuned: Tuned, context: int | None, prompt: int | None) -> Wishes:
    """The wishes with a context and a prompt: the given ones, or those that suit the model.

    Raises:
        ValueError: the model is not made for so long a context, or the prompt is longer than it.
    """
    most = context_limit(tuned.config)
    changed = any(word.startswith(_CHANGES_LIMIT) for word in wishes.engine_arguments)
    if context is None:
        context = LONGEST if most is None else min(LONGEST, most)
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


def with_memory(wishes: Wishes, say: Say) -> Wishes:
    """The wishes with as much of the GPU as other programs leave, if that is less than the engine
    would take.

    Raises:
        ValueError: the user wants more.
    """
    free, total = torch.cuda.mem_get_info(gpu_device())
    has, left = (shown_size(size, down=True) for size in (total, free))
    left = f"the GPU has {has}, of which {left} are free"
    if wishes.gpu_memory is not None and wishes.gpu_memory > free:
        raise ValueError(f"--gpu-memory {shown_size(wishes.gpu_memory)}: {left}")
    if wishes.gpu_memory is not None or free >= MEMORY_PART * total:
        return wishes
    say(f"{left}: other programs use it, and the engine is to take what they leave")
    # What is free may become a little less until the engine starts.
    return replace(wishes, gpu_memory=int(_FREE_PART * free))


def share_of(wishes: Wishes, rates: GpuRates | HostRates, engine: str) -> float | None:
    """The share of the GPU that the engine is told to take; None if the user did not say. SGLang's
    does not include what it takes while computing."""
    if wishes.gpu_memory is None or isinstance(rates, HostRates):
        return None
    return (wishes.gpu_memory - (ENGINE_TAKES if engine == "sglang" else 0)) / rates.total


def gpu_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
