"""Decides which experts deserve slots while a model runs, and whether moving them pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..device.cache import Totals
from ..routes.policies import DecayedLFU, Policy, Uses

_SHORT, _LONG = 3, 64  # tokens after which a use counts half: of recency, and of frequency
_LOOKS = 4  # of which one compares the policies
_AVERAGED = 32  # comparisons
_BETTER = 0.02  # share of the uses by which another policy must be better to be used
_NEVER = np.iinfo(np.int64).max
_WINDOW = 64  # tokens after which a move is judged
_MEMORY = 128  # moves over which their gain is averaged
_WORTH = 0.5  # uses per move, below which moving does not pay
_JUDGED_AT_ONCE = 4096  # moves that wait for their judgement


def make_policies() -> list[Policy]:
    """The policies to choose from, by what the model's routes reward: recency, and frequency, which
    is better where uses do not repeat soon or slots are few.

    Recency is a count that fades within some tokens rather than the time of the last use. Of the
    experts that were just used, the bus can often take only a part, and those that were used more
    than once lately are worth more: with a quarter of an upload per layer and token, there are 2 to
    8% more hits of all uses than with LRU, and without a bound about as many.
    """
    return [DecayedLFU(_SHORT, margin=0.1), DecayedLFU(_LONG, margin=1.0)]


class Scores:
    """Scores of all experts of L layers, from what the device has counted.

    slots: [L]. All policies see all uses. For each, the share of uses is averaged that the experts
    with the highest scores had, as many as there are slots; the best policy is the one in use.
    """

    def __init__(self, policies: Sequence[Policy], slots: np.ndarray, experts: int) -> None:
        self._policies, self._slots, shape = policies, slots, (len(slots), experts)
        for policy in policies:
            policy.start(np.full(shape, _NEVER))
        self._uses = np.zeros(shape, np.int64)
        self._tokens = self._looks = self._used = 0
        self._values: list[np.ndarray] = [np.zeros(shape) for _ in policies]
        self._hits = np.zeros(len(policies))

    def see(self, totals: Totals) -> bool:
        """Takes new batches into account. Returns whether there were any."""
        tokens = int(totals.tokens.max())
        if tokens == self._tokens:
            return False
        uses = totals.uses.copy()
        new = uses - self._uses
        if len(self._policies) > 1 and self._looks % _LOOKS == 0:
            self._compare(new)
        self._looks += 1
        at = np.flatnonzero(new)
        times = totals.last_use.reshape(-1)[at].astype(np.float64)
        seen = Uses(at, new.reshape(-1)[at], times, np.full(len(at), _NEVER))
        passed = max(0, tokens - self._tokens)
        self._values = [policy.see(seen, passed).reshape(uses.shape) for policy in self._policies]
        self._uses, self._tokens = uses, tokens
        return True

    def _compare(self, new: np.ndarray) -> None:
        total = new.sum()
        if not total:
            return
        rows = np.arange(len(self._slots))
        for number, values in enumerate(self._values):
            lowest = np.sort(values, axis=1)[rows, -self._slots]
            share = new[values >= lowest[:, None]].sum() / total
            self._hits[number] += (share - self._hits[number]) / _AVERAGED
        best = int(self._hits.argmax())
        if self._hits[best] > self._hits[self._used] + _BETTER:
            self._used = best

    @property
    def values(self) -> np.ndarray:
        """[L, E], by the policy in use; not to be changed."""
        return self._values[self._used]

    @property
    def policy(self) -> Policy:
        """The policy in use. An expert must score its margin more to replace another."""
        return self._policies[self._used]


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
