"""Scores of the live cache that want other experts at each look, to move them all the time.

Imported inside an engine's process, it is used where MOVING is set.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kt_kernel.serving import cache
from kt_kernel.serving.cache_policy import MOVES

VARIABLE = "MOVING"


class RestlessScores(cache.Scores):
    """Random scores, if the variable is set when the object is made. Every expert is to move."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._values: Any = None
        self._random = np.random.default_rng(0) if VARIABLE in os.environ else None

    def look(self, memory: Any, resident: Any, evictable: Any, free: Any) -> Any:
        new, moves = super().look(memory, resident, evictable, free)
        if self._random is None:
            return new, moves
        if new or self._values is None:
            self._values = self._random.random(resident.shape)
        found = []
        for layer, room in enumerate(free):
            order = np.argsort(self._values[layer])
            away = order[~resident[layer, order]][::-1]
            here = order[evictable[layer, order]]
            pairs = zip(away, [*here[:1]] * room + [*here], strict=False)
            moved = list(enumerate(pairs))[:MOVES]
            found += [(rank, (layer, int(one), int(other))) for rank, (one, other) in moved]
        return new, [move for _, move in sorted(found)]


cache.Scores = RestlessScores  # type: ignore[misc]
