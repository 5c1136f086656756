"""What is measured for the split between bus and CPU, and from how many tokens it pays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
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
    assert measure_bus(streamer, layer, wait) == (pytest.approx(0.25), pytest.approx(0.5))
    layer.held = [3]
    assert measure_bus(streamer, layer, wait) == (pytest.approx(0.75), 0.0)


@pytest.mark.parametrize("slots", [[5], [1, 2, 7], list(range(8))])
def test_the_cpu(clock, slots: list[int]) -> None:
    class Wrapper:
        num_experts, num_experts_per_tok, hidden_size = 8, 2, 16

        def submit_and_split(self, x, ids, weights, *, slot_map, cold_slot, defer) -> None:
            assert not defer and set(ids.flatten().tolist()) == set(slots)
            clock.now += 0.5 * len(slots) + 0.125 * ids.numel()

        def sync_forward(self, x) -> None:
            pass

    assert measure_cpu(Wrapper(), slots) == (pytest.approx(0.5), pytest.approx(0.125))


TIMES = st.floats(1e-6, 1e-2)


@settings(max_examples=50, deadline=None)
@given(bus=TIMES, expert=TIMES, token=TIMES, cold=st.integers(1, 64), k=st.sampled_from([1, 2, 8]))
def test_streaming_pays_from(bus: float, expert: float, token: float, cold: int, k: int) -> None:
    made = Rates(bus, expert, token, 1e-4)
    tokens = made.pays_from(cold, k)
    assert tokens is not None  # the CPU's time grows without bound

    def saved(tokens: int) -> float:
        counts = [tokens * k // cold + (i < tokens * k % cold) for i in range(cold)]
        alone = made.on_cpu(sum(map(bool, counts)), sum(counts))
        return 1 - made._split(counts)[1] / alone

    assert saved(tokens) > 0.1
    assert tokens == 1 or saved(tokens - 1) <= 0.1


def test_streaming_never_pays() -> None:
    assert Rates(1.0, 0.0, 0.0).pays_from(8, 2) is None
    assert Rates(1e-6, 1.0, 1.0).pays_from(0, 0.0) is None
