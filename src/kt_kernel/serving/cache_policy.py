"""Decides which experts deserve slots while a model runs, and whether moving them pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..device.cache import CacheMemory, Totals
from ..routes.policies import DecayedLFU
from ..runtime.variant import native

_SHORT, _LONG = 3, 64  # tokens after which a use counts half: of recency, and of frequency
MOVES = 4  # of a layer, at one look
_MOST = 64  # of all layers: what is not moved now is wanted again at the next look
_WINDOW = 64  # tokens after which a move is judged
_MEMORY = 128  # moves over which their gain is averaged
_WORTH = 0.5  # uses per move, below which moving does not pay
_FULLY = 2.5  # uses per move, from which moves may take all of their rate
# Of the rate, while moves do not pay, to notice when they do. With a sixteenth of a PCIe 5 bus,
# decoding without locality took 5 to 6% longer; with this, 0.5 to 2.5% on average of a run's rows.
_LITTLE = 1 / 64
_JUDGED_AT_ONCE = 4096  # moves that wait for their judgement


def make_policies() -> list[DecayedLFU]:
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

    slots: those of each layer. All policies see all uses. For each, the share of uses is averaged
    that the experts with the highest scores had, as many as there are slots; the best policy is the
    one in use. The compiled core computes it all without Python's lock (kernels/cache/scores.h).
    """

    def __init__(self, policies: Sequence[DecayedLFU], slots: Sequence[int], experts: int) -> None:
        self._policies = policies
        given = [(policy.half_life, policy.margin) for policy in policies]
        self._core = native().CacheScores(given, list(slots), experts)

    def look(
        self,
        memory: CacheMemory,
        resident: np.ndarray,
        evictable: np.ndarray,
        free: Sequence[int],
    ) -> tuple[bool, list[tuple[int, int, int]]]:
        """Takes new batches into account. Returns whether there were any, and moves: (layer, expert
        that should get a slot, expert that should lose its own), the most valuable first; some for
        each layer. Experts for free slots come first in their layer, and nothing is to be lost for
        them.

        memory: its ``counted`` is brought up to date first. resident, evictable: bool [L, E], see
        `LayerSlots`; free: slots of each layer that wait for an expert.
        """
        found: tuple[bool, list[tuple[int, int, int]]] = self._core.look(
            memory.counted.values, resident, evictable, free, MOVES, _MOST, memory.fetch
        )
        return found

    @property
    def policy(self) -> DecayedLFU:
        """The policy in use. An expert must score its margin more to replace another."""
        return self._policies[self._core.policy]


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

    @property
    def share(self) -> float:
        """Of the rate that uploads may take. The more of them there are, the less each gains, and
        the less this is: so their number settles where one more is about worth what it costs."""
        return min(max((self.mean - _WORTH) / (_FULLY - _WORTH), _LITTLE), 1.0)
