"""Long batches: cold experts that are copied to the GPU, and how they are shared with the CPU.

From a threshold of tokens on, the experts with the most tokens go over the bus to the GPU, and the
CPU computes the others meanwhile. From a second threshold on, sharing would save next to nothing,
so all cold experts are streamed: then nothing depends on the routes, the host does not wait for
them, and copies start while the layer before is still computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..device.streaming.experts import PackedExperts
from ..device.streaming.prepared import PreparedKernel
from ..device.streaming.rates import Rates
from ..device.streaming.routes import divide_routes
from ..device.streaming.streamer import ExpertStreamer, Group
from ..device.streaming.timeline import LayerStamps, Timeline
from ..device.tracer import tracer_of
from ..moe.activation import ExpertActivation
from ..moe.routing import need_padding, without_padding
from .activations import SILU

#: An engine's product of hidden states with some experts: (x [T, H], slots [T, k], weights [T, k],
#: their weights, what they compute) -> [T, H]. Routes with slot -1 have weight 0 and are skipped.
Products = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Group, ExpertActivation], torch.Tensor
]

THRESHOLD_FLAG = "--kt-gpu-prefill-token-threshold"
_KEPT = 1 << 12  # numbers of tokens of which it is known whether all experts are streamed
_logger = logging.getLogger("kt_kernel.serving")


@dataclass
class StreamCounters:
    """What was streamed so far.

    Attributes:
        streamed_batches: batches of a layer, some of whose experts were streamed.
        streamed_tokens: their tokens.
        streamed_experts: experts that were copied.
        streamed_bytes: over the bus.
        shared_batches: streamed batches in which the CPU computed some experts.
        shared_experts: experts with tokens that the CPU computed in these.
        shared_routes: pairs of token and expert that the CPU computed in these.
        split_wait_ns: nanoseconds that the host waited for the routes, to divide the experts.
    """

    streamed_batches: int = 0
    streamed_tokens: int = 0
    streamed_experts: int = 0
    streamed_bytes: int = 0
    shared_batches: int = 0
    shared_experts: int = 0
    shared_routes: int = 0
    split_wait_ns: int = 0


class ModelStreaming:
    """What the layers of a model share: memory on the device, rates, and thresholds.

    threshold: tokens from which batches are streamed. products: the engine's kernels. given:
    whether a user chose the threshold. traced: whether KT_TRACE gets the batches.
    """

    def __init__(
        self,
        streamer: ExpertStreamer,
        lane: Any,
        rates: Rates,
        threshold: int,
        products: Products,
        given: bool = True,
        traced: bool = True,
    ) -> None:
        self.streamer, self.rates, self.products = streamer, rates, products
        self.threshold = threshold
        self.divide = PreparedKernel()  # of `divide_routes`
        self._lane = lane
        self._given = given
        self._whole: dict[tuple[int, int, int], bool] = {}
        tracer = tracer_of(lane.device) if traced else None
        self._timeline = None if tracer is None else Timeline(lane, tracer.streamed.append)
        self._told = False

    def wants(self, x: torch.Tensor) -> bool:
        """Whether a batch x [T, H] is streamed. Nothing is streamed in a CUDA graph, because what
        is copied depends on the batch; the first time, a line in the log says so. It is a warning
        if a user chose the threshold."""
        tokens = x.shape[0]
        if tokens < self.threshold or x.device != self._lane.device:
            return False
        if not self._lane.capturing():
            return True
        if not self._told:
            self._told = True
            _logger.log(
                logging.WARNING if self._given else logging.INFO,
                "kt: batches of %d tokens are captured in a CUDA graph, in which nothing can be "
                "streamed: their cold experts stay on the CPU, although streaming begins at %d "
                "tokens; to stream batches of this size, let the engine capture smaller ones only",
                tokens,
                self.threshold,
            )
        return False

    def stamps(self, **about: Any) -> LayerStamps | None:
        """Begins the record of a streamed layer, with the first fields of `LayerStamps`; None
        without KT_TRACE."""
        return None if self._timeline is None else self._timeline.start(**about)

    def ended(self, stamps: LayerStamps | None) -> None:
        """Ends that record."""
        if stamps is not None:
            stamps.end = self._lane.stamp_compute()

    def whole(self, tokens: int, top_k: int, cold: int, experts: int) -> bool:
        """Whether all cold experts are streamed, see `Rates.whole`."""
        key = tokens, top_k, cold
        found = self._whole.get(key)
        if found is None:
            if len(self._whole) >= _KEPT:
                self._whole.clear()
            routes = tokens * top_k * cold / experts
            found = self._whole[key] = self.rates.whole(tokens, routes, cold)
        return found


class LayerStreaming:
    """The streaming of one layer. wrapper: its InferenceMoEWrapper. activation: what its experts
    compute."""

    def __init__(
        self,
        model: ModelStreaming,
        wrapper: Any,
        packed: PackedExperts,
        activation: ExpertActivation = SILU,
    ) -> None:
        self._model, self._wrapper, self._packed = model, wrapper, packed
        self._activation = activation
        self._experts: int = wrapper.num_experts
        self._last: tuple[list[int], torch.Tensor | None] = [], None  # of `_places`
        self.counters = StreamCounters()

    def wants(self, x: torch.Tensor) -> bool:
        """Whether a batch x [T, H] is streamed."""
        return self._model.wants(x)

    def start(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        cold: Sequence[int],
        slot_map: torch.Tensor,
        cold_slot: int,
        padding: torch.Tensor | None,
        live: bool = False,
    ) -> StreamedBatch:
        """Starts a batch: the copies to the device, and the CPU on the experts that stay there.

        cold: the cold experts. live: they are those of a moment ago. Then the CPU gets whatever is
        neither hot by the slot map nor streamed. The other arguments are those of
        `HybridLayer.submit`.
        """
        model, top_k = self._model, topk_ids.shape[1]
        layer, position, chain = self._wrapper.place
        if padding is not None:  # a kernel reads it by these numbers
            need_padding(layer, padding, x.shape[0], x.device)
        left = [0, 0]  # to the CPU: experts, and pairs of token and expert
        if model.whole(x.shape[0], top_k, len(cold), self._experts):
            streamed = list(cold)
        else:
            tokens = self._tokens(topk_ids, padding, cold)
            streamed = model.rates.split(tokens, x.shape[0])
            left = [sum(map(bool, tokens)) - len(streamed), sum(tokens)]
            left[1] -= sum(tokens[expert] for expert in streamed)
        places = self._places(streamed, x.device)
        stamps = model.stamps(
            layer=layer,
            position=position,
            chain=chain,
            tokens=x.shape[0],
            experts=len(streamed),
            on_cpu=left[0],
        )
        groups = model.streamer.stream(self._packed, streamed, stamps)
        divided = divide_routes(
            model.divide,
            topk_ids,
            topk_weights,
            slot_map,
            places,
            streamed=len(streamed),
            room=model.streamer.room(self._packed),
            cold_slot=cold_slot,
            padding=padding,
            live=live,
        )
        on_cpu, routes = live or left[0] > 0, divided.hot
        if on_cpu:
            slots, hot_weights = self._wrapper.submit_and_split(
                x,
                divided.on_cpu,
                topk_weights,
                slot_map=slot_map,
                cold_slot=cold_slot,
                padding=padding,
                defer=False,
            )
            routes = slots.to(topk_ids.dtype), hot_weights
        self._count(x.shape[0], len(streamed), *left)
        return StreamedBatch(
            model, routes, on_cpu, groups, divided.groups, stamps, self._activation
        )

    def _count(self, tokens: int, streamed: int, experts_left: int, routes_left: int) -> None:
        counters = self.counters
        counters.streamed_batches += 1
        counters.streamed_tokens += tokens
        counters.streamed_experts += streamed
        counters.streamed_bytes += streamed * self._packed.expert_bytes
        counters.shared_batches += experts_left > 0
        counters.shared_experts += experts_left
        counters.shared_routes += routes_left

    def _tokens(
        self, topk_ids: torch.Tensor, padding: torch.Tensor | None, cold: Sequence[int]
    ) -> list[int]:
        """How many tokens each cold expert has; 0 for the others. Waits for the device."""
        began = time.monotonic_ns()
        ids = (topk_ids if padding is None else without_padding(topk_ids, padding)).cpu().numpy()
        self.counters.split_wait_ns += time.monotonic_ns() - began
        ids = ids[(ids >= 0) & (ids < self._experts)].astype(np.int64, copy=False)
        counts = np.bincount(ids, minlength=self._experts).tolist()
        here = set(cold)
        return [count if expert in here else 0 for expert, count in enumerate(counts)]

    def _places(self, streamed: list[int], device: torch.device) -> torch.Tensor:
        """int32 [E]: for each streamed expert its number in the order of memory, -1 for the
        others."""
        if self._last[1] is None or self._last[0] != streamed:
            numbers = [-1] * self._experts
            for place, expert in enumerate(self._packed.sorted(streamed)):
                numbers[expert] = place
            # From pinned memory, or the host would wait for the device.
            places = torch.tensor(
                numbers, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
            )
            self._last = streamed, places.to(device, non_blocking=True)
        assert self._last[1] is not None
        return self._last[1]


class StreamedBatch:
    """A batch under way.

    Attributes:
        routes: those of the hot experts.
        on_cpu: whether the CPU computes some experts.
    """

    def __init__(
        self,
        model: ModelStreaming,
        routes: tuple[torch.Tensor, torch.Tensor],
        on_cpu: bool,
        groups: Iterator[Group],
        group_routes: list[tuple[torch.Tensor, torch.Tensor]],
        stamps: LayerStamps | None,
        activation: ExpertActivation,
    ) -> None:
        """group_routes: slots and weights [T, k] for each of the groups."""
        self._activation = activation
        self.routes, self.on_cpu = routes, on_cpu
        self._model, self._groups, self._stamps = model, groups, stamps
        self._group_routes = group_routes

    def add(self, x: torch.Tensor, hot: torch.Tensor | None) -> torch.Tensor | None:
        """hot plus the sum of the streamed experts [T, H], rounded once; None if both are empty."""
        total = hot
        for group, routes in zip(self._groups, self._group_routes, strict=True):
            part = self._model.products(x, *routes, group, self._activation)
            if total is None:
                total = part
            elif total.dtype == torch.float32 and total is not hot:
                total.add_(part)
            else:
                total = total.float() + part
        self._model.ended(self._stamps)
        return None if total is None else total.to(x.dtype)
