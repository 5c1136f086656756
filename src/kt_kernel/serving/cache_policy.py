"""Decides which experts deserve slots while a model runs, and whether moving them pays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ..device.cache import Totals
from ..routes.policies import LRU, DecayedLFU, Policy, Uses

FEW_SLOTS = 0.08  # share of the experts below which frequency does better than recency
_HALF_LIFE = 64  # tokens, of the frequency
_NEVER = np.iinfo(np.int64).max
_WINDOW = 64  # tokens after which a move is judged
_MEMORY = 128  # moves over which their gain is averaged
_WORTH = 0.5  # uses per move, below which moving does not pay
_JUDGED_AT_ONCE = 4096  # moves that wait for their judgement


def make_policy(share: float) -> Policy:
    """The policy for layers that have slots for a share of their experts."""
    policy: Policy = DecayedLFU(_HALF_LIFE, margin=1.0) if share < FEW_SLOTS else LRU()
    if not policy.margin:
        policy.margin = 2.0  # tokens
    return policy


class Scores:
    """Scores of all experts of L layers, from what the device has counted."""

    def __init__(self, policy: Policy, layers: int, experts: int) -> None:
        self._policy, self._shape = policy, (layers, experts)
        policy.start(np.full((layers, experts), _NEVER))
        self._uses = np.zeros((layers, experts), np.int64)
        self._tokens = 0
        self.values = np.zeros((layers, experts))

    def see(self, totals: Totals) -> bool:
        """Takes new batches into account. Returns whether there were any."""
        tokens = int(totals.tokens.max())
        if tokens == self._tokens:
            return False
        uses = totals.uses.copy()
        at = np.flatnonzero(uses != self._uses)
        counts = (uses - self._uses).reshape(-1)[at]
        times = totals.last_use.reshape(-1)[at].astype(np.float64)
        seen = Uses(at, counts, times, np.full(len(at), _NEVER))
        self.values = self._policy.see(seen, max(0, tokens - self._tokens)).reshape(self._shape)
        self._uses, self._tokens = uses, tokens
        return True

    @property
    def margin(self) -> float:
        """How much more an expert must score than one in a slot to replace it."""
        return self._policy.margin


@dataclass(frozen=True)
class _Move:
    token: int
    layer: int
    expert: int
    instead_of: int
    uses: int
    uses_of_other: int


class Gain:
    """How many more uses an expert has than the one that it replaced, in the tokens after a move.

    Where routes have no locality, this is 0 on average: moving experts then only costs time.
    """

    def __init__(self) -> None:
        self.mean = 2 * _WORTH  # a guess, until moves were judged
        self._moves: deque[_Move] = deque(maxlen=_JUDGED_AT_ONCE)

    def moved(self, totals: Totals, layer: int, expert: int, instead_of: int) -> None:
        """Remembers a move."""
        uses = totals.uses[layer]
        token = int(totals.tokens[layer])
        self._moves.append(
            _Move(token, layer, expert, instead_of, int(uses[expert]), int(uses[instead_of]))
        )

    def judge(self, totals: Totals) -> None:
        """Takes moves into account that are long enough ago."""
        while self._moves and totals.tokens[self._moves[0].layer] >= (
            self._moves[0].token + _WINDOW
        ):
            move = self._moves.popleft()
            uses = totals.uses[move.layer]
            gain = uses[move.expert] - move.uses - (uses[move.instead_of] - move.uses_of_other)
            # Many requests at once make more uses in as many tokens, but no more per token.
            self.mean += (min(max(float(gain), -_WINDOW), _WINDOW) - self.mean) / _MEMORY

    @property
    def pays(self) -> bool:
        """Whether moves are worth their uploads."""
        return self.mean >= _WORTH
