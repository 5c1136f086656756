"""Which experts go over the bus: against all subsets."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt_kernel import _C

TIMES = st.floats(0, 10, allow_subnormal=False)


def seconds(tokens: list[int], streamed: tuple[int, ...], rates: dict[str, float]) -> float:
    """Until both sides are finished, from the definition."""
    left = [n for e, n in enumerate(tokens) if n and e not in streamed]
    cpu = len(left) * rates["expert_on_cpu"] + sum(left) * rates["token_on_cpu"]
    if not streamed:
        return cpu
    return max(cpu, len(streamed) * rates["expert_on_bus"]) + rates["streaming"]


@given(
    tokens=st.lists(st.integers(0, 9) | st.integers(0, 5000), max_size=8),
    rates=st.fixed_dictionaries(
        {"expert_on_bus": TIMES, "expert_on_cpu": TIMES, "token_on_cpu": TIMES, "streaming": TIMES}
    ),
)
def test_no_subset_is_faster(tokens: list[int], rates: dict[str, float]) -> None:
    streamed, time = _C.split_over_bus(tokens, **rates)
    assert len(set(streamed)) == len(streamed) and all(tokens[e] for e in streamed)
    assert streamed == sorted(streamed, key=lambda e: (-tokens[e], e))
    assert math.isclose(time, seconds(tokens, tuple(streamed), rates), rel_tol=1e-9)
    busy = [e for e, n in enumerate(tokens) if n]
    best = min(
        seconds(tokens, subset, rates)
        for size in range(len(busy) + 1)
        for subset in itertools.combinations(busy, size)
    )
    assert time <= best * (1 + 1e-9)


def test_examples() -> None:
    rates = {"expert_on_bus": 1.0, "expert_on_cpu": 0.1, "token_on_cpu": 0.01}
    assert _C.split_over_bus([], **rates) == ([], 0.0)
    assert _C.split_over_bus([0, 3, 2], **rates)[0] == []  # faster on the CPU
    assert _C.split_over_bus([10, 900, 900, 500], **rates)[0] == [1, 2, 3]
    assert _C.split_over_bus([100, 100], **rates, streaming=0.09)[0] == [0]
    assert _C.split_over_bus([100, 100], **rates, streaming=1.2)[0] == []
    free = dict.fromkeys(rates, 0.0)
    assert _C.split_over_bus([5, 5], **free)[0] == []  # the smallest of equal splits


@pytest.mark.parametrize("name", ["expert_on_bus", "expert_on_cpu", "token_on_cpu", "streaming"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_rates(name: str, value: float) -> None:
    rates = dict.fromkeys(["expert_on_bus", "expert_on_cpu", "token_on_cpu"], 1.0) | {name: value}
    with pytest.raises(ValueError, match=rf"^{name} .*at least 0"):
        _C.split_over_bus([1], **rates)


def test_bad_tokens() -> None:
    with pytest.raises(ValueError, match="expert 1 has -2 tokens"):
        _C.split_over_bus([1, -2], expert_on_bus=1, expert_on_cpu=1, token_on_cpu=1)
