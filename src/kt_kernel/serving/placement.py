"""Selects the experts that are hot at the start, from the options and the model's configuration.

Every rank computes the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..moe.placement import Placement, generate_gpu_experts_masks
from ..routes.masks import ExpertMasks
from ..routes.statistics import ExpertStatistics
from ..runtime.text import ranges
from .model_config import described_layers, num_experts, routed_model
from .option_table import OptionError
from .options import KTOptions

_SEED = 0  # of the strategy "random"
_STRATEGY = "--kt-expert-placement-strategy"


@dataclass(frozen=True)
class PlacementPlan:
    """The placements of a model's layers at the start.

    Attributes:
        reason: what selected the hot experts, for the log.
        layers: placement of each MoE layer, by its number. None: the same rule holds for each
            layer, so their numbers need not be known.
    """

    options: KTOptions
    num_experts: int
    reason: str
    layers: Mapping[int, Placement] | None = None

    def of(self, layer_idx: int) -> Placement:
        """The placement of a layer; OptionError if the plan has no such layer."""
        if self.layers is None:
            return initial_placement(self.options, self.num_experts, layer_idx)
        placement = self.layers.get(layer_idx)
        if placement is None:
            raise OptionError(f"layer {layer_idx} has experts, but {self.reason} has no such layer")
        return placement

    @property
    def all_hot(self) -> bool:
        """Whether every expert of every layer is hot."""
        if self.layers is None:
            return self.of(0).all_hot
        return all(placement.all_hot for placement in self.layers.values())

    @property
    def some_hot(self) -> bool:
        """Whether any expert is hot."""
        if self.layers is None:
            return self.of(0).num_hot > 0
        return any(placement.num_hot for placement in self.layers.values())

    @property
    def some_split(self) -> bool:
        """Whether any layer has both hot and cold experts."""
        placements = [self.of(0)] if self.layers is None else self.layers.values()
        return any(p.num_hot and not p.all_hot for p in placements)


def initial_placement(options: KTOptions, num_experts: int, layer_idx: int) -> Placement:
    """The placement of one layer with a strategy that looks at each layer by itself; OptionError
    if the layer has too few experts."""
    if options.gpu_experts_mask is not None or options.strategy in ("frequency", "front-loading"):
        raise ValueError(f"{options.describe()}: these options need the model's configuration")
    count = options.hot_count(num_experts)
    if options.strategy == "uniform":
        return Placement.first(num_experts, count)
    order = np.random.Generator(np.random.PCG64([_SEED, layer_idx])).permutation(num_experts)
    return Placement.from_mask(torch.from_numpy(np.isin(np.arange(num_experts), order[:count])))


def plan_placement(options: KTOptions, config: Any) -> PlacementPlan:
    """The plan for a model. config: its configuration, see `model_config`.

    - uniform: the first N experts of each layer.
    - random: N experts of each layer, drawn with a fixed seed.
    - front-loading: N times the number of layers in total; layers are filled one after the other.
    - frequency: the same total; the pairs of layer and expert that were used most, so that layers
      whose tokens agree on few experts get more of them. Experts never used come last.
    - a mask: what the file says.

    N is --kt-num-gpu-experts, or follows from --kt-gpu-experts-ratio: rounded down per layer for
    the first two strategies, and for all layers together for the others.

    Raises OptionError, one line, for files that cannot be read or belong to another model, and if
    the layers of the model are not known but needed.
    """
    experts = num_experts(config)
    if options.gpu_experts_mask is not None:
        return _by_mask(options, config, options.gpu_experts_mask)
    if options.strategy == "frequency":
        assert options.expert_stats is not None
        return _by_frequency(options, config, options.expert_stats)
    if options.strategy == "front-loading":
        layers = described_layers(config)
        if layers is None:
            raise OptionError(
                f"{_STRATEGY} front-loading: the model's configuration does not say which layers "
                "have experts; accepted: uniform, frequency, random"
            )
        masks = np.zeros((len(layers), experts), bool)
        masks.reshape(-1)[: _total(options, len(layers), experts)] = True
        return _plan(options, "front-loading", layers, masks)
    reason = "the first of each layer" if options.strategy == "uniform" else "random"
    _refuse_none(options, options.hot_count(experts), experts, "experts per layer")
    return PlacementPlan(options, experts, reason)


def _by_frequency(options: KTOptions, config: Any, path: str) -> PlacementPlan:
    with _refusing("--kt-expert-stats", path):
        statistics = ExpertStatistics.load(path)
        statistics.model.need_same(routed_model(config), "the file")
        _need_layers(statistics.layers, config)
        if not statistics.counts.any():
            raise ValueError("no expert was ever used; record it while the server has requests")
    total = _total(options, *statistics.counts.shape)
    frequencies = torch.from_numpy(statistics.frequencies)
    masks = generate_gpu_experts_masks(frequencies, total).numpy()
    reason = f"{path}, {statistics.tokens.max():.0f} tokens"
    return _plan(options, reason, statistics.layers, masks)


def _by_mask(options: KTOptions, config: Any, path: str) -> PlacementPlan:
    with _refusing("--kt-gpu-experts-mask", path):
        masks = ExpertMasks.load(path)
        if masks.model is not None:
            masks.model.need_same(routed_model(config), "the file")
        if masks.hot.shape[1] != num_experts(config):
            raise ValueError(
                f"hot has {masks.hot.shape[1]} experts; the model has {num_experts(config)}"
            )
        _need_layers(masks.layers, config)
    return _plan(options, path, masks.layers, masks.hot)


def _need_layers(layers: tuple[int, ...], config: Any) -> None:
    """ValueError unless the layers of a file are those of the model, as far as they are known."""
    wanted = described_layers(config)
    if wanted is not None and tuple(wanted) != layers:
        missing, others = set(wanted) - set(layers), set(layers) - set(wanted)
        what = f"misses layer {min(missing)}" if missing else f"has layer {min(others)}"
        raise ValueError(f"it {what}; the model's layers with experts are {ranges(wanted)}")


def _total(options: KTOptions, layers: int, experts: int) -> int:
    """Hot experts of all layers."""
    if options.gpu_experts_ratio is None:
        return options.hot_count(experts) * layers
    every = layers * experts
    total = options.share_of(every)
    _refuse_none(options, total, every, "experts of all layers")
    return total


def _refuse_none(options: KTOptions, hot: int, of: int, what: str) -> None:
    """OptionError if a ratio above 0 makes no expert hot."""
    if options.gpu_experts_ratio and not hot:
        least = math.ceil(10000 / of) / 10000
        raise OptionError(
            f"--kt-gpu-experts-ratio {options.gpu_experts_ratio:g}: of {of} {what}, that is none; "
            f"accepted: 0, or at least {least:g}"
        )


def _plan(
    options: KTOptions, reason: str, layers: tuple[int, ...] | list[int], masks: np.ndarray
) -> PlacementPlan:
    placements = {
        layer: Placement.from_mask(torch.from_numpy(mask))
        for layer, mask in zip(layers, masks, strict=True)
    }
    return PlacementPlan(options, masks.shape[1], reason, placements)


@contextmanager
def _refusing(flag: str, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError(f"{flag} {path}: {reason.removeprefix(f'{path}: ')}") from error
