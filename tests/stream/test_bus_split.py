"""Which experts go over the bus: against all subsets."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt_kernel import _C

TIMES = st.floats(0, 10, allow_subnormal=False)


def seconds(on_cpu: list[float], streamed: tuple[int, ...], rates: dict[str, float]) -> float:
    """Until both sides are finished, from the definition."""
    left = [time for e, time in enumerate(on_cpu) if time and e not in streamed]
    cpu = math.fsum(left) + (rates["batch_on_cpu"] if left else 0)
    if not streamed:
        return cpu
    return max(cpu, len(streamed) * rates["expert_on_bus"]) + rates["streaming"]


@given(
    on_cpu=st.lists(TIMES | st.sampled_from([0.0, 1.0]), max_size=8),
    rates=st.fixed_dictionaries(
        {"expert_on_bus": TIMES, "batch_on_cpu": TIMES, "streaming": TIMES}
    ),
)
def test_no_subset_is_faster(on_cpu: list[float], rates: dict[str, float]) -> None:
    streamed, time = _C.split_over_bus(on_cpu, **rates)
    assert len(set(streamed)) == len(streamed) and all(on_cpu[e] for e in streamed)
    assert streamed == sorted(streamed, key=lambda e: (-on_cpu[e], e))
    assert math.isclose(time, seconds(on_cpu, tuple(streamed), rates), rel_tol=1e-9)
    busy = [e for e, time in enumerate(on_cpu) if time]
    best = min(
        seconds(on_cpu, subset, rates)
        for size in range(len(busy) + 1)
        for subset in itertools.combinations(busy, size)
    )
    assert time <= best * (1 + 1e-9)


def test_examples() -> None:
    def split(*on_cpu: float, **more: float) -> list[int]:
        return _C.split_over_bus(list(on_cpu), **({"expert_on_bus": 1.0} | more))[0]

    assert split() == []
    assert split(0.0, 0.1, 0.2) == []  # faster on the CPU
    assert split(0.2, 9.0, 9.0, 5.0) == [1, 2, 3]
    assert split(1.1, 1.1, streaming=0.09) == [0]
    assert split(1.1, 1.1, streaming=1.2) == []
    assert split(1.1, 1.1, batch_on_cpu=0.5) == [0]
    assert split(1.1, 1.1, batch_on_cpu=0.95) == [0, 1]  # not even one is left to the CPU
    assert split(5.0, 5.0, expert_on_bus=0.0) == [0, 1]
    assert split(5.0, 5.0, expert_on_bus=10.0) == []  # the smallest of equal splits


@pytest.mark.parametrize("name", ["expert_on_bus", "batch_on_cpu", "streaming"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_rates(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*at least 0"):
        _C.split_over_bus([1.0], **({"expert_on_bus": 1.0} | {name: value}))


@pytest.mark.parametrize("value", [-2.0, math.nan, math.inf])
def test_bad_times(value: float) -> None:
    with pytest.raises(ValueError, match=r"^on_cpu\[1\] .*at least 0"):
        _C.split_over_bus([1.0, value], expert_on_bus=1)
