"""How fast a layer's experts go over the bus and are computed on the CPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.variant import native
from .experts import PackedExperts
from .streamer import ExpertStreamer

_REPETITIONS = 3
_MOST_TOKENS = 1 << 20
_FEW, _MANY = 8, 64  # tokens per expert of the two batches that are timed on the CPU


@dataclass(frozen=True)
class Rates:
    """Seconds, see kernels/stream/bus_split.h.

    Attributes:
        expert_on_bus: to copy and unpack an expert.
        expert_on_cpu: to read the weights of an expert that has tokens.
        token_on_cpu: to multiply one token with one expert, on top of that.
        streaming: what streaming costs a layer whatever is streamed.
    """

    expert_on_bus: float
    expert_on_cpu: float
    token_on_cpu: float
    streaming: float = 0.0

    def split(self, tokens: Sequence[int]) -> list[int]:
        """The experts to stream, so that the bus and the CPU finish together.

        tokens: for each expert, how many tokens it has.
        """
        return self._split(tokens)[0]

    def on_cpu(self, experts: float, routes: float) -> float:
        """Seconds of the CPU for that many experts and pairs of token and expert."""
        return experts * self.expert_on_cpu + routes * self.token_on_cpu

    def pays_from(self, cold: int, routes_per_token: float) -> int | None:
        """The smallest number of tokens for which streaming makes a layer at least a tenth
        faster, if its routes are spread evenly; None if none does.

        cold: experts on the CPU. routes_per_token: to these experts.
        """

        def pays(tokens: int) -> bool:
            each, more = divmod(round(tokens * routes_per_token), cold)
            counts = [each + (i < more) for i in range(cold)]
            alone = self.on_cpu(sum(map(bool, counts)), sum(counts))
            _, seconds = self._split(counts)
            return seconds < 0.9 * alone

        if not cold or not pays(_MOST_TOKENS):
            return None
        low, high = 0, _MOST_TOKENS  # it does not pay at low, it does at high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high

    def _split(self, tokens: Sequence[int]) -> tuple[list[int], float]:
        return native().split_over_bus(
            list(tokens),
            expert_on_bus=self.expert_on_bus,
            expert_on_cpu=self.expert_on_cpu,
            token_on_cpu=self.token_on_cpu,
            streaming=self.streaming,
        )


def measure_bus(
    streamer: ExpertStreamer, layer: PackedExperts, wait: Callable[[], None]
) -> tuple[float, float]:
    """Seconds per expert, and of streaming any at all: (expert_on_bus, streaming).

    wait: returns once the device is idle. Copies one expert, and all of a layer.
    """

    def stream(slots: Sequence[int]) -> None:
        for _ in streamer.stream(layer, slots):
            pass

    held = layer.held
    one, all_ = (_fastest(functools.partial(stream, s), wait) for s in (held[:1], held))
    if len(held) == 1:
        return one, 0.0
    per_expert = max(all_ - one, 0.0) / (len(held) - 1)
    return per_expert, max(one - per_expert, 0.0)


def measure_cpu(wrapper: Any, slots: Sequence[int]) -> tuple[float, float]:
    """Seconds per expert, and per pair of token and expert: (expert_on_cpu, token_on_cpu).

    wrapper: an InferenceMoEWrapper. slots: its experts on the CPU. Computes two batches of random
    tokens, whose routes are spread evenly over the experts.
    """
    k, hidden = wrapper.num_experts_per_tok, wrapper.hidden_size
    seconds, pairs = [], []
    slot_map = torch.full((wrapper.num_experts,), -1, dtype=torch.int32, device="cpu")

    def compute(batch: tuple[torch.Tensor, ...]) -> None:
        wrapper.submit_and_split(*batch, slot_map=slot_map, cold_slot=-1, defer=False)
        wrapper.sync_forward(batch[0])

    for tokens_per_expert in (_FEW, _MANY):
        tokens = max(1, tokens_per_expert * len(slots) // k)
        # Explicit device="cpu": engines load models under a device context.
        routes = torch.arange(tokens * k, device="cpu").remainder(len(slots)).view(tokens, k)
        batch = (
            torch.randn(tokens, hidden, device="cpu").bfloat16(),
            torch.tensor(list(slots), device="cpu")[routes],
            torch.full((tokens, k), 1 / k, device="cpu"),
        )
        seconds.append(_fastest(functools.partial(compute, batch), lambda: None))
        pairs.append(tokens * k)
    per_pair = max(0.0, (seconds[1] - seconds[0]) / max(1, pairs[1] - pairs[0]))
    rest = max(0.0, seconds[0] - per_pair * pairs[0])
    return rest / min(len(slots), pairs[0]), per_pair


def _fastest(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    call()  # compiles and maps what it needs
    wait()
    taken = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - start)
    return min(taken)
