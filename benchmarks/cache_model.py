"""The model of cache.py, in the process that has its layers: weights, routes, and the cache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cache_control import FIXED, Control
from in_memory import VOCABULARY, serve_experts_from_memory, weights_without_experts
from route_table import RouteTable
from safetensors.torch import save_file
from synthetic import config

from kt_kernel.routes.simulator import as_streams
from kt_kernel.routes.synthetic import NONE, QWEN3_30B, generate
from kt_kernel.serving import cache as caches
from kt_kernel.serving.hot_delivery import HotDelivery
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.weights.expert_tensors import MATRICES
from kt_kernel.weights.packed import packed_shape

ROUTES = 8192  # tokens of which routes are generated; then they begin again
RECORDED = "recorded"
LOCALITIES = {"local": (QWEN3_30B, 0), "shifted": (QWEN3_30B, 1), "none": (NONE, 0)}  # and seeds


def write_model(args: argparse.Namespace, folder: Path) -> None:
    """Everything but the experts."""
    (folder / "config.json").write_text(json.dumps(config(args.shape, args.layers, VOCABULARY)))
    save_file(weights_without_experts(args.shape, args.layers), folder / "model.safetensors")


def kt_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of kt-moe: slots for the largest share of experts."""
    return {
        "method": args.method,
        "num_gpu_experts": round(max(args.resident) * args.shape.experts),
        "enable_dynamic_expert_update": "on",
        "hot_format": args.hot_format,
        "gpu_prefill_token_threshold": 0,  # prompts are short
    }


class Model:
    """Created before the engine loads the model.

    run: decodes some tokens, in the engine.
    """

    def __init__(self, args: argparse.Namespace, run: Callable[[], Any]) -> None:
        serve_experts_from_memory(args.engine, args.shape, args.layers, experts=1)
        HybridLayer.finish_loading = _finish_loading  # type: ignore[method-assign]
        # Of the hot experts, too, only the first one of each layer is delivered.
        HotDelivery.check_complete = lambda *given: None  # type: ignore[method-assign]
        self.routes, self._run = Routes(args), run

    @cached_property
    def control(self) -> Control:
        """Of the model's cache, once it is loaded."""
        return Control(caches._caches[-1])

    @property
    def cache(self) -> caches.ModelCache:
        return self.control.cache

    def begin(self, slots: int, routes: str, streams: int, mode: str, rate: float | None) -> None:
        """The first experts get slots, and the next tokens these routes. rate: of uploads."""
        self.control.reset(slots, self._run)
        self.routes.use(routes, streams)
        self.cache.rate = rate
        self.control.mode = mode

    def use(self, routes: str, streams: int) -> None:
        """The next tokens have these routes."""
        self.routes.use(routes, streams)

    def stay(self) -> None:
        """Experts no longer move."""
        self.control.mode = FIXED

    def state(self) -> dict[str, Any]:
        """The cache's counters, its gain, the rate of its uploads, and the bytes of an expert."""
        return self.control.counters() | {
            "gain": self.cache._gain.mean,
            "rate": self.cache.rate,
            "expert_bytes": self.cache.layers[0].packed.expert_bytes,
        }


class Routes:
    """Generated or recorded routes in place of the routers' choice."""

    def __init__(self, args: argparse.Namespace) -> None:
        sizes = {"experts": args.shape.experts, "per_token": args.shape.top_k}
        if args.record is not None:
            self._records = {RECORDED: args.record}
        else:
            self._records = {
                name: generate(replace(locality, **sizes), ROUTES, args.layers, seed)
                for name, (locality, seed) in LOCALITIES.items()
            }
        self._table = RouteTable(next(iter(self._records.values())))
        self._table.install()

    def use(self, name: str, streams: int) -> None:
        """The next tokens have these routes."""
        self._table.use(as_streams(self._records[name], streams))


def _finish_loading(layer: HybridLayer, original: Any = HybridLayer.finish_loading) -> None:
    """The loader delivered the first expert of each layer, and the others get its packed weights.
    Slots get theirs from the CPU when the cache starts."""
    every = range(layer.num_experts)
    assert layer._loading is not None
    _copy_first_expert(layer)
    layer._loading._packed.update(every)
    layer.wrapper._arrived.update(every)
    if layer.hot is not None:
        layer.hot._arrived.update((slot, which) for slot in every for which in MATRICES)
    original(layer)


def _copy_first_expert(layer: HybridLayer) -> None:
    """Every other expert gets the packed weights of the first one."""
    core, forms = layer.wrapper._core, layer.wrapper._form
    hidden, inter = layer.hidden_size, layer.moe_intermediate_size
    shapes = (inter, hidden), (inter, hidden), (hidden, inter)
    matrices = []
    for number, (form, shape) in enumerate(zip(forms, shapes, strict=True)):
        matrices.append(np.empty(packed_shape(form, *shape), np.uint8))
        core.save_packed(0, number, matrices[-1])
    for expert in range(1, layer.num_experts):
        core.load_packed(expert, *matrices)
