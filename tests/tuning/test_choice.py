"""Which candidate kt tune chooses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_time_model import SHAPE, E, linear, model

from kt_kernel.tuning.choice import Candidate, Goal, HotChoice, Limits, choose, predict
from kt_kernel.tuning.model import Load
from kt_kernel.tuning.plan import room_for

EXPERT = 2 * SHAPE.expert_weights


def hot_choices(*counts: int) -> list[HotChoice]:
    return [
        HotChoice(n, Load.uniform(SHAPE, n), "auto", EXPERT, n * EXPERT * len(SHAPE.moe_layers))
        for n in counts
    ]


def candidates(
    each: dict[tuple[str, int | None], float], hots: tuple[int, ...], goal: Goal, **limits: Any
) -> tuple[list[Candidate], Limits]:
    given = Limits(
        **{"memory": 1e12, "methods": tuple({m for m, _ in each}), "deferred": 0} | limits
    )
    cpus = [linear(method, seconds, threads) for (method, threads), seconds in each.items()]
    return predict(model(), cpus, hot_choices(*hots), (0, 1, 2), goal, given), given


@given(
    each=st.dictionaries(
        st.tuples(st.sampled_from(["INT4_G32", "BF16"]), st.sampled_from([None, 4, 8])),
        st.floats(1e-6, 1e-3),
        min_size=1,
    ),
    hots=st.sets(st.integers(0, E), min_size=1, max_size=3).map(tuple),
    goal=st.builds(
        Goal, st.integers(1, 8192), st.integers(1, 1000), st.sampled_from([1, 2, 4, 16])
    ),
    deferral=st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_the_choice_is_the_best_that_is_allowed(
    each: dict[tuple[str, int | None], float], hots: tuple[int, ...], goal: Goal, deferral: int
) -> None:
    found, limits = candidates(each, hots, goal, deferred=deferral)
    chosen = choose(found, limits)
    allowed = [one for one in found if not one.allowed]
    assert chosen in allowed and chosen.deferred <= deferral
    best = min(one.seconds for one in allowed)
    assert best <= chosen.seconds <= best / 0.97
    # Deferral and other threads than kt-moe's own are chosen for a gain only.
    for one in allowed:
        if one.seconds <= best / 0.97:
            assert chosen.deferred <= one.deferred
            if one.deferred == chosen.deferred and one.cpu.threads is None:
                assert chosen.cpu.threads is None


def test_the_requests_decide() -> None:
    """Long answers want few bytes, long prompts fast products."""
    goal = Goal(prompt=2048, answer=100, streams=4)
    found, _ = candidates({("INT4_G32", None): 1e-5}, (0,), goal)
    one = found[0]
    assert one.seconds == pytest.approx(4 * one.prefill[2048] + 100 * 4 / one.decode[4])
    assert one.cpu_bytes == len(SHAPE.moe_layers) * E * SHAPE.expert_weights * 0.5625


def test_what_may_not_be_chosen() -> None:
    each = {("INT4_G32", None): 1e-5, ("BF16", None): 1e-6}
    found, limits = candidates(each, (0, 8), Goal(), methods=("INT4_G32",))
    assert choose(found, limits).cpu.method == "INT4_G32"
    reasons = {(one.cpu.method, one.deferred): one.allowed for one in found}
    assert "--methods allows it" in reasons["BF16", 0]
    assert "--deferral allows it" in reasons["INT4_G32", 1]
    assert reasons["INT4_G32", 0] == ""


def test_memory_of_the_cold_experts() -> None:
    whole = len(SHAPE.moe_layers) * E * SHAPE.expert_weights * 0.5625
    each = {("INT4_G32", None): 1e-9}
    found, limits = candidates(each, (0, E // 2), Goal(), memory=0.6 * whole)
    assert choose(found, limits).hot.count == E // 2  # with fewer, they do not fit
    found, limits = candidates(each, (0, E // 2), Goal(), memory=0.4 * whole)
    with pytest.raises(ValueError, match=r"take 135MB of memory in INT4_G32 with 32 hot"):
        choose(found, limits)


def test_room_on_the_gpu() -> None:
    room = room_for(SHAPE, 20e9, 1000, 10)
    assert room.cache == 10 * 1000 * SHAPE.kv_bytes
    assert room.left == 20e9 - SHAPE.rest_bytes - room.cache - 2 * 2**30
    assert "4GB for the engine and for streaming, " in room.shown(2 << 30)
    assert "2GB for the engine, " in room.shown(0)
    with pytest.raises(ValueError, match=r"takes 2\.15GB of the GPU without any expert .* 1\.86GB"):
        room_for(SHAPE, 2e9, 1000, 10)
