"""Measures an engine's own part of a step and of a prompt, with some layers of the model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..runtime.nested import text_path
from ..serving.model_config import KINDS_AS_TEXT, number_of_layers
from ..serving.server_process import ServerFailed
from ..serving.tuned import ENGINES_PART
from .batches import batch_tokens
from .disturbance import Disturbances
from .engine import (
    LEAST_CONTEXT,
    LEFT_FREE,
    USUAL,
    VOCABULARY,
    Server,
    ServerPlan,
    measure_engine,
    serving,
)
from .model import Load, Setting, TimeModel
from .plan import Tuned
from .rates import BATCH, CpuRates, EngineRates, GpuRates, HostRates
from .shape import Shape
from .wishes import LONGEST, Say, Wishes, share_of

_LAYERS = 8  # with experts, at most
# Tokens of a context in which attention's own rate is measured, for requests with longer prompts
# than usual: four batches, in which it takes most of the time.
_LONGEST = 4 * LONGEST


def engine_rates(
    tuned: Tuned,
    wishes: Wishes,
    engine: str,
    installed: bool,
    device: GpuRates | HostRates,
    disturbances: Disturbances,
    say: Say,
) -> EngineRates:
    """Measured with a small model of the same layers and random weights, or the usual ones."""
    usual, shape = USUAL[engine], tuned.shape
    if not (installed and wishes.measure_engine and isinstance(device, GpuRates)):
        return usual
    if text_path(vars(tuned.config)):
        say(f"{engine} is not measured, because the model is multimodal; its usual times are taken")
        return usual
    part = small_shape(shape, wishes.gpu_memory or ENGINES_PART * device.total)
    longest = LONGEST if wishes.goal.prompt <= LONGEST else _LONGEST
    context = min(longest, wishes.context)
    if context < LEAST_CONTEXT:
        say(f"{engine} is not measured with so short a context; its usual times are taken")
        return usual
    more = wishes.engine_arguments
    memory = share_of(wishes, device, engine)
    plan = ServerPlan(
        engine,
        tuned.path,
        context,
        16,
        memory=memory,
        more=more,
        overrides=first_layers(vars(tuned.config), part.layers),
    )
    batch = batch_tokens(engine, device, more)
    say(f"measuring {engine} with {part.layers} layers of the model, random weights")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kt-tune-") as folder,
            serving(plan, VOCABULARY, Path(folder) / "log", server_environment(), say) as server,
            disturbances.during(engine, server.cpu_times),
        ):
            return measure_small(engine, server, part, device, context - LEFT_FREE[engine], batch)
    except ServerFailed as problem:
        say(f"{engine} could not be measured ({problem}); its usual times are taken")
        return usual


def small_shape(shape: Shape, memory: float) -> Shape:
    """The first layers of a model: as many with experts as fit into half of the memory, but at
    least two and at most eight, and those without experts before them."""
    expert = shape.expert_weights * shape.value_bytes * shape.experts
    count = min(max(int(memory / 2 / expert), 2), _LAYERS)
    moe_layers = shape.moe_layers[:count]
    layers = moe_layers[-1] + 1
    return replace(
        shape,
        layers=layers,
        moe_layers=moe_layers,
        layer_bytes=shape.layer_bytes * layers // shape.layers,
        reach=shape.reach[:layers],
        kv_bytes=shape.kv_bytes * layers // shape.layers,
    )


def first_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The changes of a configuration that leave the first layers of its model: their number, and
    lists with an entry for each layer, which transformers requires to be as long."""
    layers = number_of_layers(SimpleNamespace(**config))
    lists = {
        name: value[:count]
        for name, value in config.items()
        if (("layer" in name and isinstance(value, list)) or name == KINDS_AS_TEXT)
        and len(value) == layers
    }
    return lists | {"num_hidden_layers": count}


def measure_small(
    engine: str,
    server: Server,
    part: Shape,
    device: GpuRates,
    longest: int,
    batch: int = BATCH,
) -> EngineRates:
    """See `measure_engine`. part: of the served model, all of whose experts are on the GPU."""
    model = TimeModel(part, device, USUAL[engine], context=64)
    nothing = CpuRates("", None, 0, ((1, 0.0),), ((1, 0.0),))
    hot = Setting(Load.uniform(part, part.experts), nothing, part.expert_weights * part.value_bytes)
    return measure_engine(
        engine,
        server,
        part.layers,
        model.operations,
        device.flops,
        lambda streams: model.device_step(hot, streams),
        longest,
        batch,
    )


def server_environment() -> dict[str, str]:
    """Of servers: only the options of their command count."""
    ours = "KT_CONFIG", "KT_STATS_FILE", "KT_TRACE"
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
