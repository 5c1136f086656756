"""What is tuned: the model, the memory that it may take, and the candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint import Checkpoint, method_of, open_checkpoint
from ..checkpoint.method import QUANTISE
from ..moe.placement import generate_gpu_experts_masks
from ..routes.statistics import ExpertStatistics
from ..runtime.text import shown_size
from ..serving.budget import hot_expert_bytes
from ..serving.class_check import from_hub, read_config
from ..serving.hot_format import decide_hot_format
from ..serving.hub_headers import HeadersOnly
from ..serving.model_config import model_classes, number_of_layers, plain_swiglu, routed_model
from ..serving.option_table import OptionError
from ..serving.options import KTOptions
from ..serving.own_loading import loads_in_its_own_way
from ..serving.streamed_models import may_stream
from ..serving.streaming_start import DEFAULT_MEMORY
from ..serving.tuned import quantisation_of
from ..weights.formats import LayerForm
from ..weights.methods import METHODS, get_method
from .choice import HotChoice
from .model import Load
from .shape import Shape, as_config, shape_of

_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75)
# Bytes of a GPU that an engine takes besides weights and KV cache: the CUDA context, its kernels,
# graphs and the activations of its largest batch.
ENGINE_TAKES = 2 << 30
# Methods to compare for 16-bit weights, next to the one that `auto` selects.
_COMPARED = ("INT4_G32", "AMXINT8", "BF16")


@dataclass(frozen=True)
class Tuned:
    """The model to be tuned.

    Attributes:
        path: local folder, or as given if the weights are not there.
        config: see `shape.as_config`.
        checkpoint: of a repository that is not in the cache, its headers; None if there are none.
        method: the one that `auto` selects.
        absent: bytes of weights that must be downloaded before the model is served.
    """

    model: str
    path: str
    config: Any
    shape: Shape
    checkpoint: Checkpoint | None
    method: str
    quantisation: str
    absent: int = 0

    def form(self, method: str) -> LayerForm:
        """How experts are packed in a method.

        Raises:
            ValueError: the method keeps quantised weights, and the model's have another format.
        """
        form = get_method(method).layer_form
        if form is not None and method != self.method:
            return form
        if self.checkpoint is not None and get_method(method).quantised:
            layer = self.shape.moe_layers[0]
            sizes = self.checkpoint.sizes(layer)
            with self.checkpoint.each_expert(layer, *sizes, (), method) as stream:
                if stream.form is not None:
                    return stream.form
        if form is None:
            raise ValueError(f"method {method}: {self.model} has no weights in its format")
        return form

    def may_stream(self, method: str) -> bool:
        """Whether a server with this method may stream cold experts to the GPU."""
        return may_stream(KTOptions(method=method), self.config, self.checkpoint)

    def streaming_takes(self, method: str, hot: int) -> int:
        """Bytes of the GPU that a server with so many hot experts in each layer keeps for streamed
        ones, at most."""
        some_cold = hot < self.shape.experts
        return DEFAULT_MEMORY if some_cold and self.may_stream(method) else 0


def find_model(model: str, changes: Mapping[str, Any] | None = None) -> Tuned:
    """The model by a folder or a repository, of which no more than its headers is downloaded.
    changes: of its configuration, by the user.

    Raises:
        ValueError, OSError: there is none, or it has no experts.
    """
    if Path(model).is_file():
        raise ValueError(
            f"{model}: a file; expected the model's folder, or a repository (org/name)"
        )
    content = read_config(model)
    config = as_config(content, changes)
    headers, checkpoint = HeadersOnly(), None
    path = model if Path(model).exists() else from_hub(model, take=headers)
    if Path(path).is_dir():
        try:
            checkpoint = open_checkpoint(path)
        except FileNotFoundError:  # config.json alone
            checkpoint = None
    choice = QUANTISE
    if checkpoint is not None:
        count = number_of_layers(config)
        choice = method_of(checkpoint, None if count is None else range(count))
    try:
        shape = shape_of(model, config, checkpoint)
    except OptionError as error:
        raise ValueError(f"{model}: {error}") from error
    return Tuned(
        model,
        path,
        config,
        shape,
        checkpoint,
        choice.method,
        quantisation_of(config),
        headers.absent,
    )


def methods_of(tuned: Tuned, wanted: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(methods to measure, methods that may be chosen). wanted: what the user accepts; none: the
    method that `auto` selects.

    Raises:
        ValueError: a method is unknown, or keeps weights that the model does not have.
    """
    for method in wanted:
        if method not in METHODS:
            raise ValueError(f"--methods {method}: unknown method; accepted: {', '.join(METHODS)}")
        if METHODS[method].quantised and method != tuned.method:
            raise ValueError(
                f"--methods {method}: it keeps quantised weights, and those of {tuned.model} are "
                f"kept by {tuned.method}"
            )
        if not _fits(tuned, method):
            shape = tuned.shape
            raise ValueError(
                f"--methods {method}: experts of {shape.hidden} x {shape.inter} are not multiples "
                f"of {METHODS[method].column_unit}, which it needs"
            )
    accepted = tuple(dict.fromkeys(wanted)) or (tuned.method,)
    compared = _COMPARED if tuned.method == QUANTISE.method else ()
    measured = tuple(dict.fromkeys((*accepted, tuned.method, *compared)))
    return tuple(name for name in measured if _fits(tuned, name)), accepted


def _fits(tuned: Tuned, method: str) -> bool:
    unit = get_method(method).column_unit
    return tuned.shape.hidden % unit == 0 and tuned.shape.inter % unit == 0


@dataclass(frozen=True)
class Room:
    """The GPU's memory, in bytes. given: what the engine may take. cache: the KV cache that was
    asked for. left: what hot and streamed experts may take."""

    given: float
    weights: float
    cache: float
    left: float

    def shown(self, streaming: float) -> str:
        """For users. streaming: bytes for streamed experts."""
        others = "the engine and for streaming" if streaming else "the engine"
        return (
            f"{shown_size(self.given)} of the GPU: {shown_size(self.weights)} weights besides "
            f"the experts, {shown_size(self.cache)} KV cache, "
            f"{shown_size(ENGINE_TAKES + streaming)} for {others}, "
            f"{shown_size(max(self.left - streaming, 0))} left for hot experts"
        )


def room_for(shape: Shape, memory: float, context: int, streams: int) -> Room:
    """What a GPU has left for hot and streamed experts.

    memory: bytes that the engine may take. context: tokens of each of `streams` requests whose KV
    cache is to fit.

    Raises:
        ValueError: not even the rest fits.
    """
    cache = float(shape.kv_bytes) * context * streams
    needed = shape.rest_bytes + cache + ENGINE_TAKES
    room = Room(memory, shape.rest_bytes, cache, memory - needed)
    if needed > memory:
        raise ValueError(
            f"{shape.name} takes {shown_size(needed)} of the GPU without any expert "
            f"({shown_size(shape.rest_bytes)} weights, {shown_size(cache)} KV cache for "
            f"{streams} times {context} tokens, {shown_size(ENGINE_TAKES)} for the engine), and "
            f"it may take {shown_size(memory, down=True)}; give a smaller --context or --streams, "
            "or more with --gpu-memory"
        )
    return room


def hot_choices(
    tuned: Tuned,
    engine: str,
    method: str,
    room: Room | None,
    hot_format: str,
    statistics: str | None,
) -> list[HotChoice]:
    """Numbers of hot experts to compare, up to the largest that fits. Beside cold experts that may
    be streamed, the memory for these must fit, too.

    room: None without a GPU; then no expert is hot.

    Raises:
        ValueError: statistics of another model.
        OptionError: the engine, the model or the method has no such hot experts.
    """
    shape = tuned.shape
    if room is None:
        return [HotChoice(0, _load(tuned, 0, statistics), "auto", 0.0, 0.0)]
    options = KTOptions(method=method, num_gpu_experts=1, hot_format=hot_format)
    decided = decide_hot_format(
        options,
        tuned.quantisation,
        "cuda",
        tuned.checkpoint,
        loads_in_its_own_way(engine, model_classes(tuned.config)),
        plain_swiglu(tuned.config),
    )
    sizes = shape.hidden, shape.inter, shape.value_bytes
    size = hot_expert_bytes(decided, *sizes, tuned.checkpoint, shape.gated)
    layers = len(shape.moe_layers)

    def fits(count: int) -> bool:
        taken = count * layers * size + tuned.streaming_takes(method, count)
        return not count or taken <= room.left

    counts = {round(share * shape.experts) for share in _SHARES}
    counts.add(max(filter(fits, range(shape.experts + 1))))
    # If all fit only because none is streamed then: the most beside streamed ones, too.
    most = max(filter(fits, range(shape.experts)))
    if most < shape.experts - 1:
        counts.add(most)
    return [
        HotChoice(count, _load(tuned, count, statistics), hot_format, size, count * layers * size)
        for count in sorted(filter(fits, counts))
    ]


def _load(tuned: Tuned, hot: int, statistics: str | None) -> Load:
    """Uniform routes and the first experts, or those of a file, placed by frequency."""
    shape = tuned.shape
    if statistics is None:
        return Load.uniform(shape, hot)
    found = ExpertStatistics.load(statistics)
    found.model.need_same(routed_model(tuned.config), statistics)
    chance = found.frequencies
    masks = generate_gpu_experts_masks(torch.from_numpy(chance), hot * len(chance)).numpy()
    return Load(chance, masks, np.ones(len(chance), np.int64))
