"""Routine "layer": a whole MoE layer's forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from methods import Method, Source, expert_sources, unit_of
from rounds import Line, visitor, wake_torch_pool
from shapes import SEED, Routing, Shape, check_ids, inputs

from kt_kernel import _C
from kt_kernel.runtime.pools import plan_pools

CHUNK = 1024  # tokens per pass of the core, the wrapper's default


def team_of(threads: int | None) -> tuple[Any, int]:
    """A team on this machine's nodes, and its size. threads: None for kt_kernel's choice."""
    plan = plan_pools(threads, None, None)
    return _C.Team(list(plan.threads), list(plan.nodes)), sum(plan.threads)


def make_layer(team: Any, method: Method, shape: Shape, table: str) -> Any:
    return _C.MoeLayer(
        team,
        num_experts=shape.experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        intermediate_size=shape.inter,
        forms=[method.form] * 3,
        cpu_slots=[True] * shape.experts,
        swiglu_limit=0.0,
        swiglu_alpha=0.0,
        max_tokens=CHUNK,
        table=table,
        kind=0,
    )


def load(layer: Any, slot: int, method: Method, sources: Sequence[Source]) -> None:
    dtype = 0 if method.dense else -1  # bf16, or none
    layer.load(slot, *(s.addresses for s in sources), dtypes=[dtype] * 3)


def layers_needed(shape: Shape, method: Method, cache: int) -> int:
    """Layers whose packed experts are more than twice the last-level cache."""
    return 1 + int(2.1 * cache / (shape.weights * method.bits / 8 * shape.experts))


class LayerBench:
    """Layers of one method, kernel table and thread count."""

    def __init__(
        self, shape: Shape, method: Method, table: str, threads: int | None, layers: int
    ) -> None:
        self.shape, self.method, self.table = shape, method, table
        self._team, self.threads = team_of(threads)
        sources = expert_sources(method, shape)
        self._layers = [make_layer(self._team, method, shape, table) for _ in range(layers)]
        for layer in self._layers:
            for slot in range(shape.experts):
                load(layer, slot, method, sources)
        self.packed = sum(layer.packed_bytes for layer in self._layers)
        self._routing = Routing(shape, layers, SEED)

    def output(self, tokens: int) -> torch.Tensor:
        """The output for a batch that is the same in every process: experts 0, 1, ... in turn."""
        x, weights = inputs(self.shape, tokens)
        out = torch.empty_like(x)
        self._forward(0, x, check_ids(self.shape, tokens), weights, out)
        return out

    def line(self, tokens: int, beside: str, limits: int, ceilings: dict[str, float]) -> Line:
        x, weights = inputs(self.shape, tokens)
        out = torch.empty_like(x)

        def step() -> float:
            layer, ids = self._routing.draw(tokens)
            if beside == "torch":
                wake_torch_pool()
            return self._forward(layer, x, ids, weights, out)

        return layer_line(
            {"package": "kt_moe", "table": self.table},
            self.shape,
            self.method,
            self.table,
            tokens,
            self.threads,
            len(self._layers),
            self.packed,
            beside,
            limits,
            ceilings,
            visitor(step),
        )

    def _forward(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> float:
        begin = time.perf_counter()
        self._layers[layer].submit(
            x.data_ptr(), 0, len(x), ids.data_ptr(), weights.data_ptr(), out.data_ptr()
        ).wait()
        return time.perf_counter() - begin


def layer_line(
    who: dict[str, Any],
    shape: Shape,
    method: Method,
    table: str,
    tokens: int,
    threads: int,
    layers: int,
    packed: int,
    beside: str,
    limits: int,
    ceilings: dict[str, float],
    visit: Callable[[float], list[float]],
) -> Line:
    """The line of layers whose experts take `packed` bytes together."""
    touched = Routing(shape, 1, SEED).touched(tokens)
    per_expert = packed / (layers * shape.experts)
    return Line(
        info={
            **who,
            "method": method.name,
            "tokens": tokens,
            "threads": threads,
            "beside": beside,
            "layers": layers,
            "experts_touched": touched,
            "tokens_per_expert": tokens * shape.top_k / touched,
            "packed_bytes_per_weight": per_expert / shape.weights,
            "reuse_distance": packed,
        },
        bytes=touched * per_expert,
        operations=2.0 * tokens * shape.top_k * shape.weights,
        visit=visit,
        limits=limits,
        unit=unit_of(method, table, ceilings),
        beside=beside,
    )
