"""What is measured for the split between bus and CPU, and from how many tokens it pays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel.device.streaming import rates
from kt_kernel.device.streaming.rates import Rates, measure_bus, measure_cpu


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time passes only as the test says."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_the_bus(clock) -> None:
    """Copies go on until the device is waited for."""
    queued = [0.0]

    def stream(layer: Any, slots: list[int]) -> list[None]:
        queued[0] += 0.5 + 0.25 * len(slots)
        return []

    def wait() -> None:
        clock.now += queued[0]
        queued[0] = 0.0

    layer = SimpleNamespace(held=list(range(9)))
    streamer: Any = SimpleNamespace(stream=stream)
    assert measure_bus(streamer, layer, wait) == pytest.approx(0.25)
    layer.held = [3]
    assert measure_bus(streamer, layer, wait) == pytest.approx(0.75)


def test_the_host_is_timed_apart(clock) -> None:
    """A call takes the host 3, 2 and 4 s, and the device 10, 30 and 20 s in all; the first call is
    not counted."""
    hosts, waits = iter((50.0, 3.0, 2.0, 4.0)), iter((50.0, 7.0, 28.0, 16.0))

    def passes(seconds: Any) -> None:
        clock.now += next(seconds)

    assert rates.timed(lambda: passes(hosts), lambda: passes(waits)) == (2.0, 10.0)


class Wrapper:
    """An expert takes 1 s, and 2 s with more than 10 tokens; each token of a batch 0.001 s."""

    num_experts, num_experts_per_tok, hidden_size = 8, 2, 16

    def __init__(self, clock: SimpleNamespace, slots: list[int], speed: float = 1.0) -> None:
        self.clock, self.slots, self.speed = clock, slots, speed
        self.largest = 0

    def submit_and_split(self, x, ids, weights, *, slot_map, cold_slot, defer) -> None:
        counts = ids[ids >= 0].bincount(minlength=8)
        assert not defer and set(counts.nonzero().flatten().tolist()) <= set(self.slots)
        seconds = (counts > 0).int() + (counts > 10).int()
        self.clock.now += 0.001 * len(x) + self.speed * float(seconds.sum())
        self.largest = max(self.largest, int(counts.max()))

    def sync_forward(self, x) -> None:
        pass


@pytest.mark.parametrize("slots", [[5], [1, 2, 7], list(range(8))])
def test_the_cpu(clock, monkeypatch, slots: list[int]) -> None:
    monkeypatch.setattr(rates, "_LONGEST", 1e9)
    wrapper = Wrapper(clock, slots)
    points, token = measure_cpu(wrapper, slots, torch.device("cpu"), lambda: None)
    assert token == pytest.approx(0.001)
    want = [(n, pytest.approx(1.0 if n <= 10 else 2.0, rel=0.01)) for n in (1, 4, 16, 64, 256)]
    assert list(points) == want


def test_a_slow_cpu_is_not_timed_for_long(clock) -> None:
    wrapper = Wrapper(clock, list(range(8)), 0.013)
    points, _ = measure_cpu(wrapper, wrapper.slots, torch.device("cpu"), lambda: None)
    assert [n for n, _ in points] == [1, 4, 16] and wrapper.largest == 16


def test_batches_are_not_larger_than_a_prompt(clock, monkeypatch) -> None:
    monkeypatch.setattr(rates, "_LARGEST", 100)
    wrapper = Wrapper(clock, list(range(8)), 0.001)
    points, _ = measure_cpu(wrapper, wrapper.slots, torch.device("cpu"), lambda: None)
    assert [n for n, _ in points] == [1, 4, 16]  # 64 for each of 8 experts are 256 tokens


def test_times_between_those_that_were_measured() -> None:
    made = Rates(1.0, ((1, 2.0), (5, 4.0), (7, 8.0)))
    assert made.on_cpu(range(10)).tolist() == [0, 2, 2.5, 3, 3.5, 4, 6, 8, 10, 12]
    assert Rates(1.0, ((4, 2.0),)).on_cpu([0, 1, 4, 6]).tolist() == [0, 2, 2, 3]


TIMES = st.floats(1e-6, 1e-2)


@settings(max_examples=50, deadline=None)
@given(
    bus=TIMES,
    expert=TIMES,
    token=TIMES,
    host=TIMES,
    cold=st.integers(1, 64),
    k=st.sampled_from([1, 2, 8]),
)
def test_streaming_pays_from(
    bus: float, expert: float, token: float, host: float, cold: int, k: int
) -> None:
    made = Rates(bus, ((1, expert), (2, expert + token)), 1e-6, 1e-4, host)
    tokens = made.pays_from(cold, k)
    assert tokens is not None  # the CPU's time grows without bound

    def saved(tokens: int) -> float:
        used = rates.routed(tokens, cold)
        counts = [tokens * k // used + (i < tokens * k % used) for i in range(used)]
        alone = made.on_cpu(counts).sum() + 1e-6 * tokens
        streamed = min(made._split(counts, tokens)[1], cold * bus + 1e-4)
        return 1 - max(streamed, host) / alone

    assert saved(tokens) > 0.1
    assert tokens == 1 or saved(tokens - 1) <= 0.1


def test_short_prompts_use_few_experts() -> None:
    """Rounded, half of 128 experts: a half with 64 tokens, two thirds with 128, all in the end."""
    found = [rates.routed(tokens, 128) for tokens in (1, 64, 128, 2048, 1 << 20)]
    assert found == [1, 32, 43, 62, 64]
    assert rates.routed(1, 1) == rates.routed(1 << 20, 1) == 1


def test_streaming_never_pays() -> None:
    assert Rates(1.0, ((1, 1e-9), (2, 1e-9))).pays_from(8, 2) is None
    assert Rates(1e-6, ((1, 1.0),)).pays_from(0, 0.0) is None


def test_when_all_experts_are_streamed() -> None:
    """Eight experts take 8 s on the bus. The CPU takes 1 s for an expert with a token, 2 with two,
    and so on, and is a tenth slower meanwhile."""
    made = Rates(1.0, ((1, 1.0), (2, 2.0)))
    assert not made.whole(8, 8, 8)  # four on the CPU: half the time
    assert not made.whole(8, 16, 8)  # two on the CPU: 6 s
    assert not made.whole(8, 40, 8)  # one on the CPU saves 1 s of 8
    assert Rates(1.0, ((1, 1.0), (2, 2.0)), ahead=1.0).whole(8, 40, 8)  # as do copies ahead
    assert Rates(1.0, ((1, 1.0), (2, 2.0)), host=8.0).whole(8, 8, 8)  # the host takes as long
    assert made.whole(8, 80, 8)  # not even one is faster on the CPU
    slow = Rates(1.0, ((1, 1.0), (2, 2.0)), token_on_cpu=0.9)
    assert slow.whole(8, 8, 8)  # handing the batch over takes the CPU 7.2 s
