"""The time model of `kt tune`: how long a decode step and a prompt take.

A decode step of T streams takes the longer of what the host and the devices need:

    step  = max(host(T), head(T) + Σ layers (rest(T) + moe(T)))

- host(T): the engine's Python code of a step. It runs ahead of the GPU.
- head(T): the output matrix, sampling, and the small kernels that prepare a step.
- rest(T): attention, norms and router of a layer, measured in a CUDA graph, and the layer's part of
  the KV cache, read from the GPU's memory.
- moe(T): the hot experts on the GPU and the cold ones on the CPU, at the same time:

    moe   = max(hot, hand-over + cold)
    hot   = HOT_KERNELS kernels + bytes of the touched hot experts / the GPU's bandwidth
    cold  = a pass with as many touched experts and routes, interpolated in measured passes. It is
            about max(bytes / read bandwidth, operations / peak).

An expert that a token selects with probability p is touched by a batch of T tokens with probability
1 - (1 - p)^T. p follows from statistics; without them, it is k / E for each expert.

With d deferred experts per token, an expert is computed at once if any token selects it among its
first k - d. The others are computed while the GPU goes on, so they hide behind `rest` and `hot`:

    layer = max(rest + max(hot, hand-over + at once), hand-over + cold)

A prompt of T tokens:

    prefill = host(1) + max(layers · launch, head + Σ layers (rest(T) + moe(T)))

where `rest` and `hot` are operations over the rate that the engine reaches on the GPU. Attention
has a rate of its own, if it was measured. Chunks of the CPU's passes add up. The layers of a
streamed batch take the longest of the copies, the GPU's products, and what the host needs to launch
them:

- All n cold experts go over the bus, in b seconds each, while the layer before is computed: n · b.
- Or both sides share them. If an expert takes a seconds on the CPU, they finish together after
  n · a · b / (a + b), and the copies wait for the routes.

If the copies take longest, the GPU unpacks and multiplies once more after the last of them.

Without a GPU, everything is computed by the CPU, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..device.streaming.rates import COPIES_AHEAD
from .rates import BATCH, CpuRates, EngineRates, GpuRates, HostRates, at_least
from .shape import Shape

# Of a layer, in a CUDA graph: entries of a ring and two kernels. Measured on an H200
# (benchmarks/results/2026-11-28-hand-over-h200.json).
HAND_OVER = 7e-6
# Of an engine's fused experts: sorting of the routes, activation, sum, and two products, each of
# which takes as long as five kernels besides reading its weights.
HOT_KERNELS = 15
# By which an engine copies and computes the positions, slots and tokens of a step.
STEP_KERNELS = 30
# Of a streamed layer in vLLM 0.26.0, in seconds: what the host takes to launch it, besides what it
# takes without streaming (benchmarks/results/2026-11-29-prompts-vllm-h200.json).
STREAMED_HOST = 2e-3
_BESIDE_BUS = 1.1  # copies take memory bandwidth: the CPU is as much slower
_GAIN = 0.9  # of the time on the CPU, that a server wants for streaming
_VALUE = 2  # bytes of a hidden state


@dataclass(frozen=True, eq=False)
class Load:
    """Which experts tokens select, and which are hot.

    Attributes:
        chance: float64 [R, E]: the probability that a token selects an expert.
        hot: bool [R, E].
        layers: how many layers each of the R rows stands for.
    """

    chance: np.ndarray
    hot: np.ndarray
    layers: np.ndarray

    @classmethod
    def uniform(cls, shape: Shape, hot: int) -> Load:
        """Every expert is equally likely, and as many are hot in each layer."""
        chance = np.full((1, shape.experts), shape.top_k / shape.experts)
        mask = np.arange(shape.experts)[None] < hot
        return cls(chance, mask, np.array([len(shape.moe_layers)]))

    def batches(self, tokens: int) -> Iterator[tuple[int, Batch]]:
        """For each row, how many layers it stands for, and what a batch of tokens touches there."""
        touched = 1 - (1 - np.minimum(self.chance, 1.0)) ** tokens
        routes = self.chance * tokens
        for i, layers in enumerate(self.layers):
            hot = self.hot[i]
            yield (
                int(layers),
                Batch(
                    tokens=tokens,
                    hot=float(touched[i][hot].sum()),
                    cold=float(touched[i][~hot].sum()),
                    hot_routes=float(routes[i][hot].sum()),
                    cold_routes=float(routes[i][~hot].sum()),
                    held=int((~hot).sum()),
                    chance=self.chance[i][~hot],
                ),
            )


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of a layer. hot, cold: touched experts; *_routes: routes to them. held: all cold
    experts. chance: float64 [held], the probability that a token selects one."""

    tokens: int
    hot: float
    cold: float
    hot_routes: float
    cold_routes: float
    held: int
    chance: np.ndarray

    def at_once(self, deferred: int, top_k: int) -> tuple[float, float]:
        """(experts, routes) that are not deferred."""
        if not deferred:
            return self.cold, self.cold_routes
        kept = max(top_k - deferred, 0) / top_k
        protected = 1 - (1 - np.minimum(self.chance * kept, 1.0)) ** self.tokens
        # All routes of a protected expert are computed at once.
        routes = protected * self.chance * self.tokens
        return float(protected.sum()), float(max(routes.sum(), protected.sum()))


@dataclass(frozen=True)
class Setting:
    """Options whose speed is predicted.

    Attributes:
        hot_bytes: bytes of an expert on the GPU.
        deferred: --kt-max-deferred-experts-per-token.
        streaming: tokens of a batch from which experts are streamed; None: never.
    """

    load: Load
    cpu: CpuRates
    hot_bytes: float
    deferred: int = 0
    streaming: int | None = None


@dataclass(frozen=True)
class TimeModel:
    """Predicts times of a model, in seconds.

    Attributes:
        shape: of the model.
        device: the GPU, or the CPU without one.
        engine: what the engine adds.
        context: tokens before those that are decoded.
        batch_tokens: of the engine's largest batch; longer prompts are divided.
        captured: tokens of the largest batch in CUDA graphs, in which nothing is streamed.
    """

    shape: Shape
    device: GpuRates | HostRates
    engine: EngineRates
    context: int = 2048
    batch_tokens: int = BATCH
    captured: int = 0

    def decode(self, setting: Setting, streams: int) -> float:
        """Seconds of a decode step of so many streams."""
        return max(self.engine.host_step(streams), self.device_step(setting, streams))

    def device_step(self, setting: Setting, streams: int) -> float:
        """Seconds of the devices for a decode step."""
        rest = self._rest(streams)
        dense = self.shape.layers - len(self.shape.moe_layers)
        total = dense * rest + self._head(streams)
        for layers, batch in setting.load.batches(streams):
            total += layers * self._decode_layer(setting, batch, rest)
        return total

    def tokens_per_second(self, setting: Setting, streams: int) -> float:
        """Of all streams together."""
        return streams / self.decode(setting, streams)

    def prefill(self, setting: Setting, tokens: int) -> float:
        """Seconds to the first token of a prompt."""
        size = self.batch_tokens
        return sum(
            self._prefill_batch(setting, min(size, tokens - before), before)
            for before in range(0, tokens, size)
        )

    def _prefill_batch(self, setting: Setting, tokens: int, before: int) -> float:
        rest = self._rest_of_prompt(tokens, before)
        dense = self.shape.layers - len(self.shape.moe_layers)
        total = dense * rest + self._head(1)
        after = 0.0
        for layers, batch in setting.load.batches(tokens):
            if self._streams(setting, batch):
                seconds, after = self._streamed_layer(setting, batch, rest)
            else:
                seconds = self._prefill_layer(setting, batch, rest)
            total += layers * seconds
        total += after
        launched = self.shape.layers * self.engine.launch
        return self.engine.host_step(1) + max(launched, total)

    def streaming_from(self, setting: Setting) -> int | None:
        """The tokens of a batch from which a server will stream experts, as it decides itself: on
        the layer with the most cold ones, if half of them have all routes. None: never."""
        if not isinstance(self.device, GpuRates):
            return None
        load = setting.load
        at = int((~load.hot).sum(1).argmax())
        cold = int((~load.hot[at]).sum())
        if not cold:
            return None
        routes = float(load.chance[at][~load.hot[at]].sum())
        busy = -(-cold // 2)

        def pays(tokens: int) -> bool:
            each = self._expert(setting, tokens * routes / busy)
            alone = busy * each / _BESIDE_BUS + tokens * setting.cpu.token
            return self._streamed(setting, tokens, busy, each, cold) < _GAIN * alone

        if self.captured >= self.batch_tokens or not pays(self.batch_tokens):
            return None
        low, high = 0, self.batch_tokens  # it does not pay at low, it does at high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return max(high, self.captured + 1)

    # ---- decode

    def _rest(self, streams: int) -> float:
        per_layer = self.shape.kv_bytes / self.shape.layers * self.context * streams
        if isinstance(self.device, HostRates):
            weights = self.shape.layer_bytes / self.shape.layers
            return (weights + per_layer) / self.device.bandwidth
        return at_least(self.device.rest, streams) + per_layer / self.device.bandwidth

    def _head(self, tokens: int) -> float:
        """Seconds of what a step computes besides its layers."""
        if isinstance(self.device, HostRates):
            return self.shape.head_bytes / self.device.bandwidth
        return at_least(self.device.head, tokens) + STEP_KERNELS * self.device.kernel

    def _decode_layer(self, setting: Setting, batch: Batch, rest: float) -> float:
        cold = setting.cpu.seconds(batch.cold, batch.cold_routes)
        if isinstance(self.device, HostRates):
            return rest + cold
        hot = self._hot(setting, batch)
        if not cold:
            return rest + hot
        over = self._hand_over(batch.tokens)
        now = setting.cpu.seconds(*batch.at_once(setting.deferred, self.shape.top_k))
        return max(rest + max(hot, over + now), over + cold)

    def _hot(self, setting: Setting, batch: Batch) -> float:
        if not batch.hot or isinstance(self.device, HostRates):
            return 0.0
        read = batch.hot * setting.hot_bytes / self.device.bandwidth
        return HOT_KERNELS * self.device.kernel + read

    def _hand_over(self, tokens: int) -> float:
        """Hidden states go to the CPU, and a sum comes back."""
        assert isinstance(self.device, GpuRates)
        return HAND_OVER + 2 * _VALUE * tokens * self.shape.hidden / self.device.bus

    # ---- prompts

    def _flops(self) -> float:
        share = 1.0 if isinstance(self.device, HostRates) else self.engine.share
        return share * self.device.flops

    def operations(self, tokens: int) -> tuple[float, float]:
        """(floating-point operations of a layer for a prompt without attention's, those of
        attention)."""
        experts = 2.0 * self.shape.expert_weights * tokens * self.shape.top_k
        return experts + self._projections(tokens), self._attention(tokens, 0)

    def _rest_of_prompt(self, tokens: int, before: int) -> float:
        """Seconds of a layer without its experts, for tokens that follow others."""
        own = None if isinstance(self.device, HostRates) else self.engine.attention
        attention = self._flops() if own is None else own * self.device.flops
        return (
            self._projections(tokens) / self._flops() + self._attention(tokens, before) / attention
        )

    def _projections(self, tokens: int) -> float:
        weights = self.shape.layer_bytes / self.shape.value_bytes / self.shape.layers
        return 2 * weights * tokens

    def _attention(self, tokens: int, before: int) -> float:
        """Scores and their products with values, over the tokens before each one; the mean of all
        layers."""
        pairs = sum(_pairs(tokens, before, reach) for reach in self.shape.reach)
        return 4.0 * self.shape.attention * pairs / self.shape.layers

    def _products(self, routes: float) -> float:
        """Seconds of the GPU for experts with so many routes."""
        return 2 * self.shape.expert_weights * routes / self._flops()

    def _prefill_layer(self, setting: Setting, batch: Batch, rest: float) -> float:
        cold = self._cold_chunks(setting, batch)
        if isinstance(self.device, HostRates):
            return rest + cold
        hot = self._products(batch.hot_routes)
        if not cold:
            return rest + hot
        return rest + max(hot, self._hand_over(batch.tokens) + cold)

    def _streamed_layer(self, setting: Setting, batch: Batch, rest: float) -> tuple[float, float]:
        """(seconds of the layer, seconds that the GPU needs after the last copy of a prompt)."""
        each = self._expert(setting, batch.cold_routes / batch.held)
        copies = self._streamed(setting, batch.tokens, batch.held, each, batch.held)
        after = self._unpacking(setting, batch.held) + self._products(batch.cold_routes)
        gpu = rest + self._products(batch.hot_routes) + after
        return max(copies, gpu), after if copies > gpu else 0.0

    def _streams(self, setting: Setting, batch: Batch) -> bool:
        """Whether experts of a batch are streamed."""
        begin = setting.streaming
        return begin is not None and batch.tokens >= begin and bool(batch.held)

    def _unpacking(self, setting: Setting, experts: int) -> float:
        """Seconds of the GPU to unpack so many experts."""
        written = _VALUE * self.shape.expert_weights
        return experts * (setting.cpu.expert_bytes + written) / self.device.bandwidth

    def _expert(self, setting: Setting, rows: float) -> float:
        """Seconds of the CPU for an expert with so many rows, beside copies."""
        at_once = setting.cpu.chunk * self.shape.top_k / self.shape.experts
        full, last = divmod(rows, at_once)
        curve = setting.cpu.rows
        seconds = full * at_least(curve, at_once) + (at_least(curve, last) if last else 0.0)
        return _BESIDE_BUS * seconds

    def _streamed(self, setting: Setting, tokens: int, busy: int, each: float, held: int) -> float:
        """Seconds of a streamed layer besides the GPU's products: `busy` of `held` cold experts
        have routes, and take `each` seconds on the CPU. The server shares by the same rule."""
        assert isinstance(self.device, GpuRates)
        copy = setting.cpu.expert_bytes / self.device.bus
        whole = held * copy
        shared = busy * each * copy / (each + copy) + tokens * setting.cpu.token
        if shared < min(_GAIN * whole, whole - COPIES_AHEAD):
            whole = shared + COPIES_AHEAD
        return max(self.engine.launch + STREAMED_HOST, whole)

    def _cold_chunks(self, setting: Setting, batch: Batch) -> float:
        """Seconds of the CPU: full passes, and one with the rest."""
        cpu = setting.cpu
        full, last = divmod(batch.tokens, cpu.chunk)
        seconds = 0.0
        for count, tokens in ((full, cpu.chunk), (1, last)):
            if count and tokens:
                touched = 1 - (1 - np.minimum(batch.chance, 1.0)) ** tokens
                routes = float(batch.chance.sum()) * tokens
                seconds += count * cpu.seconds(float(touched.sum()), routes)
        return seconds


def _pairs(tokens: int, before: int, reach: float) -> float:
    """How many pairs of tokens attention computes, if tokens follow others and see `reach` ones."""
    # The first of them see fewer.
    growing = min(max(reach - before, 0.0), tokens)
    return growing * (before + growing / 2) + (tokens - growing) * min(reach, before + tokens)
