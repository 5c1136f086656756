"""Predicts how fast a model decodes with a cache, from a simulated hit rate and measured times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .policies import Policy
from .simulator import Replay, Result

_ROUNDS = 6


@dataclass(frozen=True)
class Costs:
    """Seconds.

    Attributes:
        step: of a decode step in which every expert is hot.
        miss: that an expert without a slot adds to a step: the CPU's time for it.
        upload: that the bus needs for an expert.
        beside: that an upload adds to a step, because it reads the memory that the CPU reads.
    """

    step: float
    miss: float
    upload: float
    beside: float = 0.0

    def of(self, result: Result, passes: int) -> float:
        """Seconds of a step with a result of so many passes."""
        return self.step + (result.missed * self.miss + result.uploads * self.beside) / passes


@dataclass(frozen=True)
class Prediction:
    """A simulated result, and how long its steps take: seconds, and tokens per second of all
    streams."""

    result: Result
    seconds: float
    tokens_per_second: float


def predict(
    replay: Replay, policy: Callable[[], Policy] | None, slots: int, costs: Costs, share: float
) -> Prediction:
    """A cache whose uploads may take a share of the bus, from 0 to 1; without a policy, the first
    experts.

    A longer step has time for more uploads, and more hits make it shorter, so this repeats the
    simulation until both fit.
    """
    passes = replay.counted_passes

    def at(uploads: float) -> tuple[Result, float]:
        result = replay.first(slots)
        if policy is not None:
            result = replay.run(policy(), slots, uploads)
        return result, costs.of(result, passes)

    result, seconds = at(0.0)
    for _ in range(_ROUNDS if policy is not None else 0):
        uploads = share * seconds / (costs.upload * replay.layers)
        result, found = at(uploads)
        seconds = (seconds + found) / 2
    tokens = result.tokens / passes
    seconds = costs.of(result, passes)
    return Prediction(result, seconds, tokens / seconds)
