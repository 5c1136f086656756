"""Whether, and from how many tokens on, a loaded model's long batches are streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..device.streaming.experts import PackedExperts
from ..device.streaming.rates import (
    COPIES_AHEAD,
    HOST_LAUNCHES,
    Rates,
    Timed,
    measure_bus,
    measure_cpu,
    routed,
    timed,
    timed_on_cpu,
)
from ..device.streaming.streamer import ExpertStreamer
from ..moe.activation import ExpertActivation
from ..runtime.text import shown_size
from ..runtime.variant import kernel_kind
from .option_table import OptionError
from .options import KTOptions
from .streaming import THRESHOLD_FLAG, LayerStreaming, ModelStreaming, Products

MEMORY_FLAG = "--kt-gpu-prefill-memory"
DEFAULT_MEMORY = 2 << 30
_TOKENS = 64  # of the batch by which the cost of streaming is measured
_LARGEST = 8192  # tokens: without a gain up to there, nothing is streamed by default
# Without --kt-gpu-prefill-memory, at most this part of what the engine has not taken yet: without
# flags, and with a threshold, which asks for streaming.
_PART_LEFT, _PART_LEFT_IF_ASKED = (8, "an eighth"), (2, "half")


@dataclass(frozen=True)
class EngineSide:
    """What streaming needs of an engine.

    Attributes:
        products: its kernels.
        interleaves: whether these take rows of gate and up in turn for experts that compute this;
            None if they do not compute it.
        memory_left: bytes on a device that it has not taken yet.
        captured: tokens of the largest batch that it captures in CUDA graphs; 0: it captures none.
            Smaller ones are never streamed, or a batch that runs before its capture would not
            prepare it.
        largest: tokens of its largest batch; None if there is no limit.
        graph_option: its option by which smaller batches only are captured.
    """

    products: Products
    interleaves: Callable[[ExpertActivation], bool | None]
    memory_left: Callable[[torch.device], int]
    captured: int = 0
    largest: int | None = None
    graph_option: str = ""


class Device:
    """What streaming needs of a CUDA device: a lane for copies, and access to host memory."""

    def __init__(self, device: torch.device) -> None:
        from ..device.backend import CudaBackend
        from ..device.streaming.lane import CopyLane

        self.lane: Any = CopyLane(device)
        self.backend: Any = CudaBackend(device)


def start_streaming(
    layers: Sequence[Any],
    options: KTOptions,
    device: torch.device,
    dtype: torch.dtype,
    engine: EngineSide,
    make_device: Callable[[torch.device], Any] = Device,
) -> str | None:
    """Prepares a loaded model's layers for streaming, unless the options turn it off.

    Takes the memory on the device, registers the layers' weights with the driver, and measures the
    rates of the bus and the CPU on the layer with the most cold experts. Without a number, the
    threshold is measured, and what is not possible is only logged.

    Args:
        layers: `HybridLayer`s with cold experts on this rank.
        dtype: of hidden states.

    Returns:
        A line for the log: what is streamed, or why nothing is. None if the options turn streaming
        off, no expert is cold, or no option asks for it and the device is no GPU.

    Raises:
        OptionError: a flag asks for streaming, and it is not possible.
    """
    threshold, memory = options.given_threshold, options.gpu_prefill_memory
    asked = options.gpu_prefill_token_threshold is not None or memory is not None
    if not layers or threshold == 0 or (device.type != "cuda" and not asked):
        return None
    # Memory is divided, and times are measured, by the layer with the most cold experts.
    layers = sorted(layers, key=lambda layer: -layer.placement.num_cold)
    start = _Start(layers, threshold, memory, device, dtype, engine, make_device)
    try:
        return start.run()
    except _NotStreamed as why:
        for experts in start.packed:
            experts.release()
        if not start.asked or isinstance(why, _NeverPays):
            return f"kt: no experts are streamed to the GPU: {why}"
        flag = f"{THRESHOLD_FLAG} {threshold}"
        if memory is not None and (threshold is None or why.of_memory):
            flag = f"{MEMORY_FLAG} {shown_size(memory)}"
        raise OptionError(f"{flag}: {why}; {why.advice}") from why
    finally:
        layers[0].forget_counters()  # of the batches that were timed


class _NotStreamed(Exception):
    """Why nothing is streamed. advice: what to do if a flag asks for it. of_memory: the memory on
    the device is the reason."""

    def __init__(
        self, reason: object, advice: str = "remove it", *, of_memory: bool = False
    ) -> None:
        super().__init__(str(reason))
        self.advice, self.of_memory = advice, of_memory


class _NeverPays(_NotStreamed):
    """It is possible, but by the measured times it would be slower."""


@dataclass
class _Start:
    """The arguments of `start_streaming`, and the packed experts of each layer."""

    layers: Sequence[Any]
    threshold: int | None
    memory: int | None
    device: torch.device
    dtype: torch.dtype
    engine: EngineSide
    make_device: Callable[[torch.device], Any]
    packed: list[PackedExperts] = field(default_factory=list)

    @property
    def asked(self) -> bool:
        """Whether a flag asks for streaming."""
        return self.threshold is not None or self.memory is not None

    def run(self) -> str:
        self._check()
        try:
            there = self.make_device(self.device)
            from ..device.streaming import unpack_kernel  # noqa: F401 - Triton may be missing

            self.packed += [layer.wrapper.packed_experts() for layer in self.layers]
        except (ImportError, ValueError) as error:
            raise _NotStreamed(error) from error
        registered = self._register(there.backend)
        biases = self._within_memory(self._load_biases)
        streamer = self._streamer(there.lane)
        first = self.layers[0]
        cold = first.placement.cold_experts
        rates = self._within_memory(lambda: self._rates(streamer, there.lane))
        top_k = first.wrapper.num_experts_per_tok * len(cold) / first.num_experts
        pays = rates.pays_from(len(cold), top_k)
        if pays is not None and self.threshold is None:
            begin = pays
            pays = self._within_memory(
                lambda: self._measured_from(begin, rates, streamer, there.lane)
            )
        begin = pays if self.threshold is None else self.threshold
        if begin is None:
            raise _NeverPays(f"it pays for no batch; {rates}")
        given = self.threshold is not None
        graphs = ""
        if begin <= self.engine.captured:
            graphs = (
                f"; {begin} would do, but the engine captures batches of up to "
                f"{self.engine.captured} tokens in CUDA graphs, which cannot be streamed "
                f"({self.engine.graph_option} changes that)"
            )
            begin = self.engine.captured + 1
        products = self.engine.products
        model = ModelStreaming(streamer, there.lane, rates, begin, products, given)
        for layer, experts in zip(self.layers, self.packed, strict=True):
            layer.start_streaming(model, experts)
        on_device = f"{shown_size(streamer.nbytes)} on the device"
        if biases:
            on_device += f", and {shown_size(biases)} with all biases,"
        why = f"measured; {THRESHOLD_FLAG} sets another number, 0 for never"
        if given:
            why = f"given; by the measured rates, streaming pays from {pays or 'no number'} on"
        total = sum(layer.packed_bytes for layer in self.layers)
        return (
            f"kt: batches of {begin} tokens and more ({why}{graphs}) stream cold experts to "
            f"{self.device}: {shown_size(total)} registered in {registered:.1f} s, "
            f"{on_device} for {streamer.room(self.packed[0])} experts at a time; {rates}"
        )

    def _measured_from(
        self, pays: int, rates: Rates, streamer: ExpertStreamer, lane: Any
    ) -> int | None:
        """The first of pays, 1.25 pays, 1.57 pays ... tokens with which a streamed batch of the
        first of the layers takes a tenth less than one on the CPU; None if none has up to
        `_LARGEST` tokens, or as many as the engine's largest batch. It never takes less than the
        host. See `Rates.pays_from` for what is streamed."""
        first = self.layers[0]
        model = ModelStreaming(streamer, lane, rates, 1, self.engine.products, traced=False)
        streaming = LayerStreaming(model, first.wrapper, self.packed[0], first.activation)
        cold, top_k = first.placement.cold_experts, first.wrapper.num_experts_per_tok
        here = set(cold)
        while pays <= min(_LARGEST, self.engine.largest or _LARGEST):
            routes = spread_routes(pays, top_k, first.num_experts)
            routes = routes_to(routed(pays, len(cold)), cold, routes)
            taken = measure_streaming(streaming, first, routes, self.dtype, self.device, lane.wait)
            streamed = max(taken.total, taken.host + HOST_LAUNCHES)
            routes.apply_(lambda expert: expert if expert in here else -1)
            alone = timed_on_cpu(first.wrapper, routes, self.device, lane.wait)
            if streamed < 0.9 * alone:
                return pays
            pays += -(-pays // 4)
        return None

    def _within_memory(self, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except torch.OutOfMemoryError as error:
            reason = f"the memory of {self.device} is used up while times are measured"
            raise _NotStreamed(reason, self._give("less"), of_memory=True) from error

    def _give(self, amount: str) -> str:
        """Advice about the memory on the device."""
        return f"give {amount}" if self.memory is not None else f"give {amount} by {MEMORY_FLAG}"

    def _rates(self, streamer: ExpertStreamer, lane: Any) -> Rates:
        """Measured on the first of the layers, with hidden states on the device."""
        first, packed = self.layers[0], self.packed[0]
        cold = first.placement.cold_experts
        on_bus = measure_bus(streamer, packed, lane.wait)
        on_cpu, token = measure_cpu(first.wrapper, cold, self.device, lane.wait)
        # A CPU that is so slow that all experts are streamed.
        slow = Rates(0.0, ((1, 1.0),))
        model = ModelStreaming(streamer, lane, slow, 1, self.engine.products, traced=False)
        streaming = LayerStreaming(model, first.wrapper, packed, first.activation)
        routes = spread_routes(_TOKENS, first.wrapper.num_experts_per_tok, first.num_experts)
        once = measure_streaming(streaming, first, routes, self.dtype, self.device, lane.wait)
        return Rates(
            on_bus,
            on_cpu,
            token,
            streaming=max(0.0, once.total - on_bus * len(cold)),
            host=once.host + HOST_LAUNCHES,
            ahead=COPIES_AHEAD,
        )

    def _check(self) -> None:
        self._check_sizes()
        if self.make_device is Device and self.device.type != "cuda":
            raise _NotStreamed(
                "experts can only be streamed to a CUDA device, and the engine runs on "
                f"{self.device}"
            )
        if self.threshold is None and kernel_kind():
            raise _NotStreamed(
                "with KT_KERNEL_KIND, results must not depend on the batch, and those of streamed "
                f"batches do; {THRESHOLD_FLAG} N streams them all the same"
            )
        for layer in self.layers:
            if self.engine.interleaves(layer.activation) is None:
                raise _NotStreamed(
                    f"layer {layer.layer_idx} has experts with {layer.activation}, which cannot "
                    "be streamed in this engine"
                )

    def _check_sizes(self) -> None:
        """Raises if no batch of the engine would be streamed, before memory is taken for it."""
        captured, largest = self.engine.captured, self.engine.largest
        if largest is None:
            return
        if captured >= largest:
            raise _NotStreamed(
                f"the engine captures all its batches, of up to {largest} tokens, in CUDA graphs, "
                f"which cannot be streamed; {self.engine.graph_option} changes that",
                "add it, or remove the other one",
            )
        if (self.threshold or 0) > largest:
            raise _NotStreamed(
                f"the engine's batches have up to {largest} tokens",
                f"give {captured + 1} to {largest}, 0 for never, or let it compute larger batches",
            )

    def _register(self, backend: Any) -> float:
        """Gives the device access to the packed experts; returns the seconds that it took."""
        began = time.perf_counter()
        try:
            for experts in self.packed:
                experts.register(backend)
        except RuntimeError as error:
            raise _NotStreamed(error, "raise the limit, or remove the option") from error
        return time.perf_counter() - began

    def _load_biases(self) -> int:
        """Takes them to the device, and decides the order of rows there. Returns their bytes."""
        for layer, experts in zip(self.layers, self.packed, strict=True):
            experts.interleaved = bool(self.engine.interleaves(layer.activation))
        return sum(experts.load_biases(self.device) for experts in self.packed)

    def _streamer(self, lane: Any) -> ExpertStreamer:
        """Takes the memory on the device."""
        size, part = self.memory or DEFAULT_MEMORY, ""
        if self.memory is None:
            left = max(self.engine.memory_left(self.device), 0)
            divisor, name = _PART_LEFT_IF_ASKED if self.asked else _PART_LEFT
            if left // divisor < size:
                size = left // divisor
                part = (
                    f"; by default, streaming takes {name} of the {shown_size(left, down=True)} "
                    f"that the engine has left, and {MEMORY_FLAG} gives it more"
                )
        try:
            streamer = ExpertStreamer(lane, size, self.packed[0], self.dtype)
            for experts in self.packed:
                streamer.need_room(experts)
        except ValueError as error:
            raise _NotStreamed(f"{error}{part}", self._give("more"), of_memory=True) from error
        except torch.OutOfMemoryError as error:
            reason = f"{shown_size(size)} are not free on {self.device}"
            raise _NotStreamed(reason, self._give("less"), of_memory=True) from error
        return streamer


def measure_streaming(
    streaming: LayerStreaming,
    layer: Any,
    routes: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    wait: Callable[[], None],
) -> Timed:
    """Seconds of a streamed batch of a layer with routes [T, k], with everything that belongs to it
    on the host and the device."""
    x = torch.randn(len(routes), layer.hidden_size, dtype=torch.float32, device=device).to(dtype)
    ids = routes.to(device)
    weights = torch.full(ids.shape, 1 / ids.shape[1], dtype=torch.float32, device=device)
    slot_map = layer.placement.slot_map(device)

    def compute() -> None:
        batch = streaming.start(
            x,
            ids,
            weights,
            cold=layer.placement.cold_experts,
            slot_map=slot_map,
            cold_slot=-1,
            padding=None,
        )
        sum_ = batch.add(x, None)
        if batch.on_cpu:
            layer.wrapper.sync_and_add(x, None, hot=sum_, scale=1.0)

    return timed(compute, wait)


def spread_routes(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """int32 [T, k] on the CPU: every expert has equally many routes."""
    routes = torch.arange(tokens * top_k, dtype=torch.int32, device="cpu")
    return routes.remainder(experts).view(tokens, top_k)


def routes_to(count: int, cold: Sequence[int], routes: torch.Tensor) -> torch.Tensor:
    """Routes like these, in which some of the cold experts, evenly chosen, have those of all."""
    some = [cold[i * len(cold) // count] for i in range(count)]
    instead = {expert: some[i % count] for i, expert in enumerate(cold)}
    return routes.clone().apply_(lambda expert: instead.get(expert, expert))
