"""The live expert cache."""

from __future__ import annotations

from functools import partial

import numpy as np

from .case import Case
from .specs import Array, Number, Real
from .things import MAX, Things


def cache_cases(t: Things) -> dict[str, list[Case]]:
    core, layers, experts = t.core, 2, 3
    scores = core.CacheScores([(3.0, 0.1), (64.0, 1.0)], [1] * layers, experts)
    flags = Array(np.zeros((layers, experts), bool))
    count = Number(4, 1, MAX, True)
    return {
        "CacheScores()": [
            Case(
                core.CacheScores,
                policies=[(Real(3.0, (0.0, -1.0)), Real(0.1, ()))] * 2,
                slots=[Number(1, 1, experts, True)] * layers,
                experts=Number(experts, 1, (1 << 24) // layers),
                extra=[(dict(policies=[]), ValueError), (dict(slots=[]), ValueError)],
            ),
        ],
        "CacheScores.look": [
            Case(
                scores.look,
                counters=Array(np.zeros((layers, experts + 4), np.int64)),
                resident=flags,
                evictable=flags,
                free=[Number(1, -MAX - 1, MAX, True)] * layers,
                per_layer=count,
                most=count,
                extra=[(dict(free=[1]), ValueError), (dict(free=[1] * 3), ValueError)],
            ),
        ],
        "wait_for_news": [
            Case(
                partial(core.wait_for_news, queue=t.uploads),
                tick=Real(1e-4, (0.0, -1.0, 2.0)),
                least=Real(0.0, ()),
                most=Real(1e-4, ()),
                passed=Array(np.zeros(1, np.int64)),
                known=Number(0, -MAX - 1, MAX, True),
                completed=Number(0, -MAX - 1, MAX, True),
            ),
        ],
        "CacheScores.policy": [Case(lambda: scores.policy)],
        "CacheScores.values": [Case(scores.values, policy=Number(1, 0, 1, True))],
    }
