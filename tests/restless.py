"""A policy of the live cache that wants other experts at each look, to move them all the time.

Imported inside an engine's process, it is used where MOVING is set.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kt_kernel.routes.policies import Policy
from kt_kernel.serving import cache

VARIABLE = "MOVING"


class Restless(Policy):
    """Random scores."""

    name, margin = "restless", -10.0

    def start(self, first_use: np.ndarray) -> None:
        self._shape, self._rng = first_use.size, np.random.default_rng(0)

    def see(self, uses: Any, tokens: int) -> np.ndarray:
        return self._rng.random(self._shape)


def _make(original: Any = cache.make_policies) -> list[Policy]:
    return [Restless()] if VARIABLE in os.environ else original()


cache.make_policies = _make
