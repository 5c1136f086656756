"""Policies of an expert cache, for the simulator: what a slot is worth to each expert.

A policy gives every expert of every layer a score. After each pass, a layer keeps, of the experts
that it holds and those that the pass used, the ones with the highest scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Uses:
    """What one pass used.

    Attributes:
        at: int64 [n], the experts used, each once: layer * E + expert.
        counts: int64 [n], tokens that used them.
        times: float64 [n], when they were used last, in tokens from the begin of the record; of one
            token's experts, those that the router weights more come later.
        next: int64 [n], number of the pass that uses them next; a large number if none does.
    """

    at: np.ndarray
    counts: np.ndarray
    times: np.ndarray
    next: np.ndarray


_TIE = 1e-6  # small beside a use, and large beside rounding


def _unused(first_use: np.ndarray) -> np.ndarray:
    """Scores [L * E] before the first use: the lower its number, the longer an expert is kept."""
    return np.broadcast_to(-_TIE * np.arange(first_use.shape[1]), first_use.shape).flatten()


class Policy(ABC):
    """A score for each expert, which `see` brings up to date.

    margin: how much more an expert must score than one in a slot to replace it.
    """

    name: str
    margin: float = 0.0

    @abstractmethod
    def start(self, first_use: np.ndarray) -> None:
        """Forgets everything. first_use: int64 [L, E], number of the pass that uses the expert
        first; a large number if none does."""

    @abstractmethod
    def see(self, uses: Uses, tokens: int) -> np.ndarray:
        """The scores float64 [L * E] after a pass of ``tokens`` tokens; the caller does not change
        them."""


class LRU(Policy):
    """The experts that were used last."""

    name = "LRU"

    def start(self, first_use: np.ndarray) -> None:
        self._scores = _unused(first_use) - 1

    def see(self, uses: Uses, tokens: int) -> np.ndarray:
        self._scores[uses.at] = uses.times
        return self._scores


class LFU(Policy):
    """The experts that were used most since the start; of equal ones, those used last."""

    name = "LFU"

    def start(self, first_use: np.ndarray) -> None:
        self._scores, self._counts = _unused(first_use), np.zeros(first_use.size)

    def see(self, uses: Uses, tokens: int) -> np.ndarray:
        self._counts[uses.at] += uses.counts
        last = uses.times
        self._scores[uses.at] = self._counts[uses.at] + last / (last + 2)
        return self._scores


class DecayedLFU(Policy):
    """The experts that were used most, where a use counts half after ``half_life`` tokens; of equal
    ones, those that the router weighted more."""

    def __init__(self, half_life: float, margin: float = 0.0) -> None:
        self.name = f"decayed LFU, {half_life:g} tokens" + (f", margin {margin:g}" * bool(margin))
        self.half_life, self.margin = half_life, margin
        self._factor = 0.5 ** (1 / half_life)

    def start(self, first_use: np.ndarray) -> None:
        self._scores = _unused(first_use)

    def see(self, uses: Uses, tokens: int) -> np.ndarray:
        self._scores *= self._factor**tokens
        self._scores[uses.at] += uses.counts + _TIE * (uses.times % 1)
        return self._scores


class Mixture(Policy):
    """A weighted sum of recency and frequency: two decayed counts, each divided by its half-life so
    that a steady use counts the same in both."""

    def __init__(self, short: float, long: float, weight: float) -> None:
        """weight: that of the short half-life, from 0 to 1; the other one has the rest."""
        self.name = f"mixture of {short:g} and {long:g} tokens, {weight:g} : {1 - weight:g}"
        self._parts = [(DecayedLFU(short), weight / short), (DecayedLFU(long), (1 - weight) / long)]

    def start(self, first_use: np.ndarray) -> None:
        for policy, _ in self._parts:
            policy.start(first_use)

    def see(self, uses: Uses, tokens: int) -> np.ndarray:
        (first, a), (second, b) = self._parts
        return a * first.see(uses, tokens) + b * second.see(uses, tokens)


class Belady(Policy):
    """The experts that are used again soonest. It knows the future, so no cache that fetches only
    what was just used is hit more often."""

    name = "Belady"

    def start(self, first_use: np.ndarray) -> None:
        self._scores = -first_use.reshape(-1).astype(np.float64)

    def see(self, uses: Uses, tokens: int) -> np.ndarray:
        self._scores[uses.at] = -uses.next.astype(np.float64)
        return self._scores
