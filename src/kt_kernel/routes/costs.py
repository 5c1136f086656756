"""Predicts how fast a model decodes with a cache, from a simulated hit rate and measured times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .policies import LRU, DecayedLFU, Policy
from .record import RouteRecord
from .simulator import Replay, Result, second_half

_ROUNDS = 6


@dataclass(frozen=True)
class Costs:
    """Seconds.

    Attributes:
        step: of a decode step in which every expert is hot.
        miss: that an expert without a slot adds to a step: the CPU's time for it.
        upload: that the bus needs for an expert.
        beside: that an upload adds to a step, because it reads the memory that the CPU reads.
        hidden: of missed experts in each layer, while the GPU computes those with a slot. A layer
            takes the longer of both.
    """

    step: float
    miss: float
    upload: float
    beside: float = 0.0
    hidden: float = 0.0

    def of(self, result: Result, passes: int) -> float:
        """Seconds of a step with a result of so many passes."""
        longer = sum(
            count * max(0.0, missed * self.miss - self.hidden)
            for missed, count in enumerate(result.missing)
        )
        return self.step + (longer + result.uploads * self.beside) / passes


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


def predictions(
    record: RouteRecord, slots: Sequence[int], costs: Costs, share: float
) -> list[Prediction]:
    """The first experts, and caches by recency and by frequency, with each number of slots per
    layer. The second half of the record is counted."""
    replay = second_half(record)
    policies = (None, LRU, lambda: DecayedLFU(3), lambda: DecayedLFU(64))
    return [predict(replay, policy, count, costs, share) for count in slots for policy in policies]


def table(found: Sequence[Prediction]) -> str:
    """A Markdown table. "uploads" are experts per token and layer, "faster" compares with the first
    experts."""
    return "\n".join(_lines(found))


def _lines(found: Sequence[Prediction]) -> Iterator[str]:
    yield "| slots | placement or policy | hits | uploads | ms per step | tokens/s | faster |"
    yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    fixed: dict[int, float] = {}
    for one in found:
        r = one.result
        first = fixed.setdefault(r.slots, one.seconds)
        yield (
            f"| {r.slots} | {r.policy} | {r.hit_rate:.1%} | {r.uploads_per_token:.2f} | "
            f"{1e3 * one.seconds:.2f} | {one.tokens_per_second:.1f} | {first / one.seconds:.2f} |"
        )
