"""Compares placements and cache policies on one record, as ``kt bench experts`` shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .policies import LFU, LRU, Belady, DecayedLFU, Mixture, Policy
from .record import RouteRecord
from .simulator import Result, second_half

POLICIES: tuple[Callable[[], Policy], ...] = (
    LRU,
    LFU,
    lambda: DecayedLFU(4),
    lambda: DecayedLFU(16),
    lambda: DecayedLFU(64),
    lambda: DecayedLFU(64, margin=0.5),
    lambda: DecayedLFU(256),
    lambda: Mixture(4, 256, 0.5),
    Belady,
)


def compare(
    record: RouteRecord, slots: Sequence[int], uploads_per_pass: float | None = None
) -> list[Result]:
    """Every placement and policy with each number of slots per layer. uploads_per_pass: see
    `Replay.run`.

    The second half of the record is counted. The first one warms the caches up, and teaches the
    placement "learned before".

    ValueError if there are fewer than two passes, or for a number of slots that the simulator does
    not accept.
    """
    replay = second_half(record)
    results = []
    for count in slots:
        results += [replay.first(count), replay.learned(count), replay.best_fixed(count)]
        results += [replay.run(policy(), count, uploads_per_pass) for policy in POLICIES]
    return results


def table(results: Sequence[Result]) -> str:
    """A Markdown table. "missed" and "uploads" are experts per token and layer."""
    lines = [
        "| slots | placement or policy | hits | of Belady's | missed | uploads |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    best = {r.slots: r.hit_rate for r in results if r.policy == Belady.name}
    for r in results:
        of_best = f"{r.hit_rate / best[r.slots]:.0%}" if best.get(r.slots) else ""
        lines.append(
            f"| {r.slots} | {r.policy} | {r.hit_rate:.1%} | {of_best} | "
            f"{r.missed_per_token:.2f} | {r.uploads_per_token:.2f} |"
        )
    return "\n".join(lines)
