"""The compiled decisions of the live cache, against the same rules written out in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grid import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel import _C

_TOKENS, _NUMBERS = 0, 4  # of a layer's counters, after its experts

Move = tuple[int, int, int]


def counters(uses: np.ndarray, tokens: list[int]) -> np.ndarray:
    """int64 [L, E + 4], with numbers that must not matter in the other places."""
    layers, experts = uses.shape
    found = np.full((layers, experts + _NUMBERS), 77, np.int64)
    found[:, :experts] = uses
    found[:, experts + _TOKENS] = tokens
    return found


def moves(
    values: np.ndarray,
    margin: float,
    resident: np.ndarray,
    evictable: np.ndarray,
    free: list[int],
    per_layer: int,
    most: int,
) -> list[Move]:
    """One candidate after the other. values: [L, E]."""
    found: list[tuple[tuple[Any, ...], Move]] = []
    for layer, scores in enumerate(values.tolist()):
        experts = range(len(scores))
        wanted = sorted((-scores[e], e) for e in experts if not resident[layer, e])
        given_up = sorted((scores[e], -e) for e in experts if evictable[layer, e])
        for rank, (negative, expert) in enumerate(wanted[:per_layer]):
            if rank < free[layer]:
                other = -given_up[0][1] if given_up else 0
                found.append(((rank, False, negative, layer), (layer, expert, other)))
            elif rank - free[layer] < min(len(given_up), per_layer):
                score, other = given_up[rank - free[layer]]
                gain = -negative - score
                if gain >= margin:
                    found.append(((rank, True, -gain, layer), (layer, expert, -other)))
    return [move for _, move in sorted(found)][:most]


@st.composite
def looks(draw: Any) -> Any:
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    policies = draw(
        st.lists(
            st.tuples(st.sampled_from([0.5, 3.0, 64.0]), st.sampled_from([-10.0, 0.0, 0.1, 1.0])),
            min_size=1,
            max_size=3,
        )
    )
    slots = draw(st.lists(st.integers(1, experts), min_size=layers, max_size=layers))
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        flags = st.lists(st.booleans(), min_size=layers * experts, max_size=layers * experts)
        used = st.lists(st.integers(0, 3), min_size=layers * experts, max_size=layers * experts)
        steps.append(
            {
                # After 2,000 tokens, all earlier uses count nothing: scores are equal.
                "tokens": draw(st.sampled_from([0, 1, 1, 2, 40, 2000])),
                "uses": np.array(draw(used)).reshape(layers, experts),
                "resident": np.array(draw(flags)).reshape(layers, experts),
                "evictable": np.array(draw(flags)).reshape(layers, experts),
                "free": draw(st.lists(st.integers(0, 3), min_size=layers, max_size=layers)),
                "per_layer": draw(st.integers(1, 5)),
                "most": draw(st.integers(1, 12)),
            }
        )
    return policies, slots, experts, steps


@given(looks())
@settings(max_examples=examples(60, full=3000), deadline=None)
def test_looks(case: Any) -> None:
    """Scores are sums over the history; shares and moves follow from the scores, ties included."""
    policies, slots, experts, steps = case
    core = _C.CacheScores(policies, slots, experts)
    layers, now, used, looked = len(slots), 0, 0, 0
    total = np.zeros((layers, experts), np.int64)
    history: list[tuple[int, np.ndarray]] = []
    shares = [0.0] * len(policies)

    def values(number: int) -> np.ndarray:
        return np.array(core.values(number)).reshape(layers, experts)

    for step in steps:
        before = [values(number) for number in range(len(policies))]
        if step["tokens"]:
            now += step["tokens"]
            total = total + step["uses"]
            history.append((now, step["uses"]))
        # The layer that is ahead has the tokens that count.
        given_tokens = [now] + [max(0, now - 1)] * (layers - 1)
        given_free = step["free"], step["per_layer"], step["most"]
        flags = step["resident"], step["evictable"]
        new, found = core.look(counters(total, given_tokens[::-1]), *flags, *given_free)
        assert new == bool(step["tokens"])
        if new and len(policies) > 1:
            if looked % 4 == 0 and step["uses"].sum():
                for number, scores in enumerate(before):
                    hits = 0
                    for layer in range(layers):
                        lowest = sorted(scores[layer])[-slots[layer]]
                        hits += step["uses"][layer][scores[layer] >= lowest].sum()
                    shares[number] += (hits / step["uses"].sum() - shares[number]) / 32
                best = int(np.argmax(shares))
                if shares[best] > shares[used] + 0.02:
                    used = best
            looked += 1
        assert core.policy == used
        for number, (half_life, _) in enumerate(policies):
            want = -1e-6 * np.arange(experts) * 0.5 ** (now / half_life)
            want = want + sum(u * 0.5 ** ((now - then) / half_life) for then, u in history)
            np.testing.assert_allclose(values(number), want + 0 * total, rtol=1e-9, atol=1e-12)
        assert found == moves(values(used), policies[used][1], *flags, *given_free)


def test_all_slots_are_full_and_nothing_is_wanted() -> None:
    core = _C.CacheScores([(3.0, 0.1)], [1], 3)
    everything = np.ones((1, 3), bool)
    used = counters(np.array([[5, 0, 0]]), [1])
    assert core.look(used, everything, everything, [0], 4, 64) == (True, [])
    # Expert 2 is worth less than expert 1 by its number, and expert 0 was used.
    there = np.array([[False, True, True]])
    assert core.look(used, there, there, [0], 4, 64) == (False, [(0, 0, 2)])
    assert core.look(used, there, ~everything, [0], 4, 64) == (False, [])
    assert core.look(used, there, ~everything, [1], 4, 64) == (False, [(0, 0, 0)])


def test_counters_that_start_again() -> None:
    """As `ModelCache.begin` does it: uses become fewer, and no time passes."""
    core = _C.CacheScores([(1.0, 0.0)], [1], 2)
    none = np.zeros((1, 2), bool)
    core.look(counters(np.array([[4, 2]]), [8]), none, none, [0], 1, 1)
    core.look(counters(np.array([[0, 1]]), [1]), none, none, [0], 1, 1)
    assert core.values(0) == pytest.approx([0, 1])


def test_scores_that_faded_are_zero() -> None:
    """Denormal numbers would make looks slow."""
    core, none = _C.CacheScores([(3.0, 0.0)], [1], 4), np.zeros((1, 4), bool)
    for tokens in range(1, 6000, 7):
        core.look(counters(np.array([[tokens, 0, 0, 0]]), [tokens]), none, none, [0], 1, 1)
    assert core.values(0)[1:] == [0, 0, 0] and core.values(0)[0] > 1


@pytest.mark.parametrize(
    ("given_values", "message"),
    [
        (([], [1], 2), "no policy"),
        (([(0.0, 0.0)], [1], 2), "half-life of 0.0+ tokens; accepted: above 0"),
        (([(1.0, float("inf"))], [1], 2), "margin of inf"),
        (([(1.0, 0.0)], [], 2), "no layer"),
        (([(1.0, 0.0)], [1, 3], 2), "3 slots; accepted: 1 to 2"),
        (([(1.0, 0.0)], [1], 0), "0 experts in 1 layers; accepted: 1 to"),
        (([(1.0, 0.0)], [1] * 3, 1 << 62), "experts in 3 layers; accepted: 1 to"),
    ],
)
def test_scores_that_make_no_sense(given_values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.CacheScores(*given_values)
