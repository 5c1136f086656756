"""The simulator against caches written down one token at a time."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from kt_kernel.routes.costs import Costs, predict
from kt_kernel.routes.locality import ages, reuse
from kt_kernel.routes.policies import LFU, LRU, Belady, DecayedLFU, Mixture, Policy
from kt_kernel.routes.record import RouteRecord
from kt_kernel.routes.simulator import Replay, as_streams
from kt_kernel.routes.synthetic import Locality, generate

E, K = 10, 3
RECORD = generate(Locality(E, K, 0.5, 0.5, 40, 1.0, 1.0, 5.0), tokens=120, layers=3, seed=5)


def counted(replay: Replay, policy: Policy, slots: int) -> tuple[int, int]:
    result = replay.run(policy, slots)
    assert result.hits + result.missed == result.uses  # each token has a pass of its own
    return result.hits, result.uploads


@pytest.mark.parametrize("slots", [1, 2, 4, 9, 10])
@pytest.mark.parametrize("counted_from", [0, 60])
def test_lru(slots: int, counted_from: int) -> None:
    hits = uploads = 0
    for layer in range(len(RECORD.layers)):
        held = OrderedDict.fromkeys(reversed(range(slots)))
        for token, row in enumerate(RECORD.routes[:, layer].tolist()):
            there = set(held)
            for expert in reversed(row):  # the router's first choice is used last
                held.pop(expert, None)
                held[expert] = None
            while len(held) > slots:
                held.popitem(last=False)
            if token >= counted_from:
                hits += len(there & set(row))
                uploads += len(set(held) - there)
    assert counted(Replay(RECORD, counted_from), LRU(), slots) == (hits, uploads)


@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize(("half_life", "margin"), [(None, 0.0), (7.0, 0.0), (7.0, 0.4)])
def test_frequency(slots: int, half_life: float | None, margin: float) -> None:
    hits = uploads = 0
    for layer in range(len(RECORD.layers)):
        held, last = set(range(slots)), {expert: -expert for expert in range(E)}
        unused = 0 if half_life is None else 1e-6
        score = {expert: -unused * expert for expert in range(E)}
        for token, row in enumerate(RECORD.routes[:, layer].tolist()):
            hits += len(held & set(row))
            for expert in score:
                score[expert] *= 1.0 if half_life is None else 0.5 ** (1 / half_life)
            for rank, expert in enumerate(row):
                preferred = 0 if half_life is None else 1e-6 * (1 - (rank + 1) / (K + 1))
                score[expert] += 1 + preferred
                last[expert] = token * K - rank
            ties = {e: last[e] if half_life is None else 0 for e in range(E)}
            worth = {e: (score[e] + margin * (e in held), ties[e]) for e in held | set(row)}
            kept = set(sorted(worth, key=lambda e: worth[e], reverse=True)[:slots])
            uploads += len(kept - held)
            held = kept
    policy = LFU() if half_life is None else DecayedLFU(half_life, margin)
    assert counted(Replay(RECORD), policy, slots) == (hits, uploads)


@pytest.mark.parametrize("most", [0, 1, 2, K])
def test_a_bound_on_uploads(most: int) -> None:
    """LRU with at most so many uploads after a pass: of the experts missed, those used last."""
    slots, uploads, hits = 4, 0, 0
    for layer in range(len(RECORD.layers)):
        held, last = set(range(slots)), {expert: -1 - expert for expert in range(E)}
        for token, row in enumerate(RECORD.routes[:, layer].tolist()):
            hits += len(held & set(row))
            for rank, expert in enumerate(row):
                last[expert] = (token + 1) * K - rank
            wanted = [expert for expert in row if expert not in held][:most]
            kept = set(sorted({*held, *wanted}, key=lambda e: last[e], reverse=True)[:slots])
            uploads += len(kept - held)
            held = kept
    found = Replay(RECORD).run(LRU(), slots, most)
    assert (found.hits, found.uploads) == (hits, uploads)
    with pytest.raises(ValueError, match="uploads_per_pass -1: expected at least 0"):
        Replay(RECORD).run(LRU(), slots, -1)


def test_fractions_of_uploads_add_up() -> None:
    """1.5 after each pass are one and two in turns."""
    replay, passes = Replay(RECORD), len(RECORD.passes)
    found = [replay.run(LRU(), 4, most).uploads for most in (0.0, 0.25, 1.0, 1.5, 2.0)]
    assert found == sorted(found) and found[0] == 0 and found[2] < found[3] < found[4]
    assert 0 < found[1] <= passes // 4 * len(RECORD.layers)


def test_predicted_steps() -> None:
    """By hand for fixed experts; a faster bus and a free one bound the cache's."""
    replay = Replay(RECORD, len(RECORD.passes) // 2)
    costs = Costs(step=2.0, miss=0.5, upload=1.0, beside=0.25)
    fixed = predict(replay, None, 4, costs, 1.0)
    missed = replay.first(4).missed / replay.counted_passes
    assert fixed.seconds == pytest.approx(2 + missed * 0.5)
    assert fixed.tokens_per_second == pytest.approx(1 / fixed.seconds)
    missing = replay.first(4).missing
    assert sum(missing) == replay.counted_passes * len(RECORD.layers)
    assert sum(number * count for number, count in enumerate(missing)) == replay.first(4).missed
    behind = replace(costs, hidden=0.6)  # one expert, and a part of the second
    longer = sum(count * (number * 0.5 - 0.6) for number, count in enumerate(missing) if number > 1)
    hidden = predict(replay, None, 4, behind, 1.0)
    assert hidden.seconds == pytest.approx(2 + longer / replay.counted_passes)
    slow, fast = (predict(replay, LRU, 4, costs, share) for share in (0.1, 0.5))
    assert 0 < slow.result.uploads < fast.result.uploads
    per_step = fast.result.uploads / replay.counted_passes
    assert per_step <= 0.5 * fast.seconds / costs.upload * 1.1
    assert predict(replay, LRU, 4, costs, 0.0).result.uploads == 0
    free = predict(replay, LRU, 4, Costs(2.0, 0.5, 1e-9), 1.0)
    assert free.result == replay.run(LRU(), 4) and free.seconds < fixed.seconds


def test_belady_is_the_optimum() -> None:
    """Against every possible choice after each token, for short records."""
    for seed in range(4):
        short = generate(Locality(5, 2, 0.5, 0, 99, 0.5, 0.5, 3.0), tokens=9, layers=1, seed=seed)
        rows = short.routes[:, 0].tolist()

        @cache
        def most(token: int, held: frozenset[int], rows=rows) -> int:
            if token == len(rows):
                return 0
            there = held | frozenset(rows[token])
            choices = itertools.combinations(sorted(there), len(held))
            rest = max(most(token + 1, frozenset(kept)) for kept in choices)
            return len(held & frozenset(rows[token])) + rest

        for slots in (1, 2, 3):
            assert Replay(short).run(Belady(), slots).hits == most(0, frozenset(range(slots)))


def test_no_policy_beats_belady_and_all_slots_hit_always() -> None:
    replay = Replay(RECORD)
    policies = [LRU(), LFU(), DecayedLFU(5), DecayedLFU(5, 0.5), Mixture(2, 50, 0.5)]
    best = replay.run(Belady(), 4)
    for policy in policies:
        assert replay.run(policy, 4).hits <= best.hits
        assert replay.run(policy, E).hit_rate == 1
        assert replay.run(policy, 4) == replay.run(policy, 4)  # it starts anew


def test_fixed_placements() -> None:
    replay, routes = Replay(RECORD, 60), RECORD.routes
    assert replay.first(4).hits == (routes[60:] < 4).sum()
    for result, source in (
        (replay.best_fixed(3), routes[60:]),
        (replay.learned(3), routes[:60]),
    ):
        hits = 0
        for layer in range(3):
            most = Counter(source[:, layer].flatten().tolist()).most_common()
            most.sort(key=lambda pair: (-pair[1], pair[0]))
            hits += np.isin(routes[60:, layer], [expert for expert, _ in most[:3]]).sum()
        assert result.hits == hits and result.uploads == 0


def test_streams_share_passes() -> None:
    """An expert that two tokens of a pass use is missed once, but is two routes."""
    batched = as_streams(RECORD, 2)
    assert batched.passes.tolist() == [i for i in range(60) for _ in range(2)]
    assert np.array_equal(batched.routes[0::2], RECORD.routes[:60])
    assert np.array_equal(batched.routes[1::2], RECORD.routes[60:])
    one = replace(
        RECORD,
        routes=np.array([[[0, 9, 8]], [[9, 8, 7]]], np.int16),
        passes=np.array([4, 4]),
        layers=(0,),
    )
    result = Replay(one).run(LRU(), 1)
    assert (result.uses, result.hits, result.missed, result.uploads) == (6, 1, 3, 1)
    with pytest.raises(ValueError, match="streams 121: expected 1 to 120"):
        as_streams(RECORD, 121)
    with pytest.raises(ValueError, match="counted_from 1: in the middle of a pass"):
        Replay(batched, 1)


def test_routes_to_no_expert() -> None:
    routes = RECORD.routes.copy()
    routes[::3, :, 1] = -1
    replay = Replay(replace(RECORD, routes=routes))
    assert replay.run(LRU(), 4).uses == (routes >= 0).sum()


def test_wrong_numbers_of_slots() -> None:
    for slots in (0, E + 1):
        with pytest.raises(ValueError, match=f"slots {slots}: expected 1 to {E}"):
            Replay(RECORD).run(LRU(), slots)


def test_ages() -> None:
    routes = np.array([[[0, 1]], [[1, 2]], [[2, -1]], [[0, 2]]])
    assert sorted(ages(routes).tolist()) == [1, 1, 1, 3]
    assert reuse(routes, 1) == 3 / 7 and reuse(routes, 3) == 4 / 7
    wanted = []
    for layer in range(3):
        last: dict[int, int] = {}
        for token, row in enumerate(RECORD.routes[:, layer].tolist()):
            for expert in row:
                if expert in last:
                    wanted.append(token - last[expert])
                last[expert] = token
    assert sorted(ages(RECORD.routes).tolist()) == sorted(wanted)


def test_decoded_tokens_have_a_pass_of_their_own() -> None:
    record = replace(RECORD, passes=np.array([0] * 100 + [*range(1, 18), 20, 20, 21]))
    decoded = record.decoded
    assert decoded.passes.tolist() == [*range(1, 18), 21]
    assert np.array_equal(decoded.routes, RECORD.routes[[*range(100, 117), 119]])


def test_statistics_of_a_record() -> None:
    record = replace(RECORD, routes=np.where(RECORD.routes == 4, -1, RECORD.routes))
    found = record.statistics()
    assert isinstance(record, RouteRecord) and (found.tokens == 120).all()
    for layer in range(3):
        there = Counter(record.routes[:, layer].flatten().tolist())
        assert found.counts[layer].tolist() == [there[expert] for expert in range(E)]
