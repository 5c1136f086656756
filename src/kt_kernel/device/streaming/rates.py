"""How fast a layer's experts go over the bus and are computed on the CPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ...runtime.variant import native
from .experts import PackedExperts
from .streamer import ExpertStreamer

_REPETITIONS = 3
_MOST_TOKENS = 1 << 20
_FAR = 1 << 24  # tokens
_HALF_USED = 64  # tokens of a prompt that uses half as many experts as a long one, see `routed`
_TOKENS = (1, 4, 16, 64, 256)  # of each expert, in the batches that are timed on the CPU
_LONGEST = 0.2  # seconds of a batch, after which no larger one is timed
_LARGEST = 4096  # tokens of such a batch: pinned memory is kept for the largest that there was
_ROWS = 1024  # tokens of the batch with a single route
# Seconds in which an engine's host launches the rest of a layer: attention, the router. With layers
# of Qwen3-30B-A3B, that and what streaming took made 5.2 to 5.8 ms a layer in vLLM 0.26.0, however
# short the prompt was.
HOST_LAUNCHES = 2.5e-3
# Seconds that a layer gains if all of its experts are streamed: copies go on while the engine
# computes attention. With these layers, sharing lost as much in vLLM 0.26.0, and 1.3 to 1.9 ms in
# SGLang 0.5.17.
COPIES_AHEAD = 2.5e-3
# Copies take memory bandwidth, so the CPU was 1.04 to 1.16 times as slow beside a busy bus.
_BESIDE_BUS = 1.1


@dataclass(frozen=True)
class Rates:
    """Seconds, see kernels/stream/bus_split.h.

    Attributes:
        expert_on_bus: to copy and unpack an expert.
        expert_on_cpu: (tokens, seconds) of an expert, by increasing numbers of its tokens. Others
            are interpolated; above the last, time grows as between the last two.
        token_on_cpu: of each token of a batch, whatever its routes: its hidden states are handed
            over, and a sum comes back.
        streaming: what streaming costs a layer whatever is streamed.
        host: what an engine's host takes to launch a streamed layer, which never takes less.
        ahead: what is gained if all experts are streamed, because copies need not wait for the
            routes.
    """

    expert_on_bus: float
    expert_on_cpu: tuple[tuple[int, float], ...]
    token_on_cpu: float = 0.0
    streaming: float = 0.0
    host: float = 0.0
    ahead: float = 0.0

    def split(self, tokens: Sequence[int], batch: int) -> list[int]:
        """The experts to stream, so that the bus and the CPU finish together.

        tokens: for each expert, how many tokens it has. batch: tokens of the whole batch.
        """
        return self._split(tokens, batch)[0]

    def on_cpu(self, tokens: Sequence[int]) -> np.ndarray:
        """float64: seconds of the CPU for experts with so many tokens each."""
        counts = np.asarray(tokens, dtype=np.float64)
        # Few tokens take as long as one: the weights are read. Experts without tokens are not.
        return np.where(counts > 0, np.interp(counts, *self._curve), 0.0)

    @functools.cached_property
    def _curve(self) -> tuple[list[float], list[float]]:
        """`expert_on_cpu`, with a point far above the last."""
        (low, before), (high, after) = ((0, 0.0), *self.expert_on_cpu)[-2:]
        slope = (after - before) / (high - low)
        points = *self.expert_on_cpu, (_FAR, after + slope * (_FAR - high))
        return [tokens for tokens, _ in points], [seconds for _, seconds in points]

    def even(self, tokens: float, cold: int) -> list[int]:
        """Tokens of each cold expert, if so many routes to them are spread evenly."""
        each, more = divmod(round(tokens), cold)
        return [each + (i < more) for i in range(cold)]

    def whole(self, batch: int, routes: float, cold: int) -> bool:
        """Whether all cold experts are to be streamed, because the CPU could save less than a tenth
        of the time, or less than `ahead`; if the batch's routes to them are spread evenly. Then
        nothing waits for the routes, and copies begin while the layer before is computed."""
        everything = max(self.everything(cold), self.host)
        shared = max(self._split(self.even(routes, cold), batch)[1], self.host)
        return shared >= min(0.9 * everything, everything - self.ahead)

    def everything(self, cold: int) -> float:
        """Seconds to stream all cold experts."""
        return cold * self.expert_on_bus + self.streaming

    def pays_from(self, cold: int, routes_per_token: float) -> int | None:
        """The smallest number of tokens for which streaming makes a layer at least a tenth
        faster, if `routed` experts have equally many routes; None if none does.

        cold: experts on the CPU. routes_per_token: to these experts.
        """

        def pays(tokens: int) -> bool:
            counts = self.even(tokens * routes_per_token, routed(tokens, cold))
            alone = self.on_cpu(counts).sum() + tokens * self.token_on_cpu
            streamed = min(self._split(counts, tokens)[1], self.everything(cold))
            return max(streamed, self.host) < 0.9 * alone

        if not cold or not pays(_MOST_TOKENS):
            return None
        low, high = 0, _MOST_TOKENS  # it does not pay at low, it does at high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high

    def __str__(self) -> str:
        by_tokens = ", ".join(f"{1e6 * s:.0f} with {n}" for n, s in self.expert_on_cpu)
        return (
            f"an expert takes {self.expert_on_bus * 1e6:.0f} us on the bus, after "
            f"{self.streaming * 1e6:.0f} us; on the CPU {by_tokens} tokens, and "
            f"{self.token_on_cpu * 1e6:.2f} us for each token of the batch; the host takes "
            f"{self.host * 1e6:.0f} us a layer"
        )

    def _split(self, tokens: Sequence[int], batch: int) -> tuple[list[int], float]:
        return native().split_over_bus(
            (_BESIDE_BUS * self.on_cpu(tokens)).tolist(),
            expert_on_bus=self.expert_on_bus,
            batch_on_cpu=batch * self.token_on_cpu,
            streaming=self.streaming,
        )


def routed(tokens: int, cold: int) -> int:
    """How many cold experts a batch uses, which is rather too small than too large: half of them at
    most, and fewer in short prompts, whose tokens resemble each other. (Of 128 experts, prompts of
    128 tokens used 46 in a layer, and of 2,048 tokens 54, with random weights.) The CPU does not
    read the others."""
    return max(1, round(cold / 2 * tokens / (tokens + _HALF_USED)))


def measure_bus(streamer: ExpertStreamer, layer: PackedExperts, wait: Callable[[], None]) -> float:
    """Seconds to copy and unpack an expert, after the first one.

    wait: returns once the device is idle. Streams one expert, and all of a layer.
    """

    def stream(slots: Sequence[int]) -> None:
        for _ in streamer.stream(layer, slots):
            pass

    held = layer.held
    one, all_ = (fastest(functools.partial(stream, s), wait) for s in (held[:1], held))
    return one if len(held) == 1 else max(all_ - one, 0.0) / (len(held) - 1)


def measure_cpu(
    wrapper: Any, slots: Sequence[int], device: torch.device, wait: Callable[[], None]
) -> tuple[tuple[tuple[int, float], ...], float]:
    """(expert_on_cpu, token_on_cpu) of `Rates`.

    wrapper: an InferenceMoEWrapper. slots: its experts on the CPU. device: where hidden states
    are. Computes batches of random tokens, whose routes are spread evenly over the experts, and
    one with a single route.
    """
    k = wrapper.num_experts_per_tok
    row = -torch.ones(1, k, dtype=torch.int64, device="cpu")
    one = row.clone()
    one[0, 0] = slots[0]
    alone = timed_on_cpu(wrapper, one, device, wait)
    idle = timed_on_cpu(wrapper, torch.cat([one, row.expand(_ROWS - 1, k)]), device, wait)
    token = max(0.0, idle - alone) / (_ROWS - 1)
    points: list[tuple[int, float]] = []
    for each in _TOKENS:
        tokens = max(1, each * len(slots) // k)
        if points and tokens > _LARGEST:
            break
        routes = torch.arange(tokens * k, device="cpu").remainder(len(slots)).view(tokens, k)
        # Explicit device="cpu": engines load models under a device context.
        ids = torch.tensor(list(slots), device="cpu")[routes]
        taken = timed_on_cpu(wrapper, ids, device, wait)
        # More tokens never take less time.
        least = points[-1][1] if points else 0.0
        busy = min(len(slots), tokens * k)
        points.append((each, max(least, (taken - tokens * token) / busy)))
        if taken > _LONGEST:
            break
    return tuple(points), token


def timed_on_cpu(
    wrapper: Any, ids: torch.Tensor, device: torch.device, wait: Callable[[], None]
) -> float:
    """Seconds of a batch of random tokens with ids [T, k] on the CPU."""
    tokens, k = ids.shape
    slot_map = torch.full((wrapper.num_experts,), -1, dtype=torch.int32, device=device)
    # Explicit types: engines load models with another default.
    x = torch.randn(tokens, wrapper.hidden_size, dtype=torch.float32, device=device).bfloat16()
    weights = torch.full((tokens, k), 1 / k, dtype=torch.float32, device=device)
    ids = ids.to(device)

    def compute() -> None:
        wrapper.submit_and_split(x, ids, weights, slot_map=slot_map, cold_slot=-1, defer=False)
        wrapper.sync_forward(x)

    return fastest(compute, wait)


def fastest(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    """The shortest of some times of a call, in seconds, until the device is idle."""
    return timed(call, wait).total


class Timed(NamedTuple):
    """Seconds of a call. host: until it returned; total: until the device was idle."""

    host: float
    total: float


def timed(call: Callable[[], Any], wait: Callable[[], None]) -> Timed:
    """The shortest of some times of a call."""
    call()  # compiles and maps what it needs
    wait()
    taken = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        wait()
        taken.append((returned - start, time.perf_counter() - start))
    return Timed(*map(min, zip(*taken, strict=True)))
