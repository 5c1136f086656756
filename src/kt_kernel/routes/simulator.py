"""Replays recorded routes through caches of hot experts, to compare policies.

Every layer has the same number of slots, and all layers are simulated at once. In a pass, experts
in a slot are hits, and all others are misses, which the CPU computes. After the pass, the policy
decides which of the missed experts are uploaded, and into whose slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .policies import Policy, Uses
from .record import RouteRecord

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Result:
    """What a policy reached with a number of slots per layer.

    Attributes:
        tokens, layers: what was counted.
        uses: routes, of all tokens and layers.
        hits: routes to experts that were in a slot.
        missed: experts that the CPU had to read: for each pass and layer, those without a slot.
        uploads: experts that were copied into a slot.
        missing: in how many passes of a layer 0, 1, 2, ... experts were missed.
    """

    policy: str
    slots: int
    tokens: int
    layers: int
    uses: int
    hits: int
    missed: int
    uploads: int
    missing: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.uses)

    @property
    def missed_per_token(self) -> float:
        """Per token and layer."""
        return self.missed / max(1, self.tokens * self.layers)

    @property
    def uploads_per_token(self) -> float:
        """Per token and layer."""
        return self.uploads / max(1, self.tokens * self.layers)


class Replay:
    """The passes of a record, prepared once for any number of simulations.

    counted_from: number of the first token that results count; the ones before it only warm the
    caches up, and teach `learned`.
    """

    def __init__(self, record: RouteRecord, counted_from: int = 0) -> None:
        self.experts, self.layers = record.model.num_experts, len(record.layers)
        self.tokens = max(0, len(record.passes) - counted_from)
        _, starts = np.unique(record.passes, return_index=True)
        self._ends = np.append(starts[1:], len(record.passes))
        self._starts = starts
        self._from = int(np.searchsorted(starts, counted_from))
        if counted_from not in (0, len(record.passes)) and counted_from not in starts:
            raise ValueError(f"counted_from {counted_from}: in the middle of a pass")
        self.passes = list(self._prepare(record))

    @property
    def counted_passes(self) -> int:
        """The passes that results count."""
        return len(self.passes) - self._from

    def _prepare(self, record: RouteRecord) -> Iterator[Uses]:
        width = record.routes.shape[2]
        base = np.arange(self.layers)[:, None] * self.experts
        later = 1 - np.arange(1, width + 1) / (width + 1)  # of one token's experts, by rank
        found = []
        for first, end in zip(self._starts, self._ends, strict=True):
            routes = record.routes[first:end]
            used = routes >= 0
            at = (routes + base)[used]
            time = np.broadcast_to(np.arange(first, end)[:, None, None] + later, routes.shape)[used]
            unique, where, counts = np.unique(at, return_inverse=True, return_counts=True)
            last = np.full(len(unique), -1.0)
            np.maximum.at(last, where, time)
            found.append((unique, counts, last))
        following = np.full(self.layers * self.experts, NEVER)
        nexts = []
        for number in range(len(found) - 1, -1, -1):
            at = found[number][0]
            nexts.append(following[at])
            following[at] = number
        self._first_use = following.reshape(self.layers, self.experts)
        for (at, counts, last), upcoming in zip(found, reversed(nexts), strict=True):
            yield Uses(at, counts, last, upcoming)

    def run(self, policy: Policy, slots: int, uploads_per_pass: float | None = None) -> Result:
        """Simulates a cache that begins with the first experts of each layer.

        uploads_per_pass: how many experts a layer may upload after a pass, those with the highest
        scores, because the bus has other work; 1.5: one and two in turns; None: all that the policy
        wants.

        ValueError unless there is at least one slot and at most one per expert, or if
        ``uploads_per_pass`` is negative.
        """
        self._check(slots)
        if uploads_per_pass is not None and uploads_per_pass < 0:
            raise ValueError(f"uploads_per_pass {uploads_per_pass}: expected at least 0")
        shape = self.layers, self.experts
        held = np.zeros(shape, bool)
        held[:, :slots] = True
        flat = held.reshape(-1)  # a view
        policy.start(self._first_use)
        hits = uploads = 0
        missing = np.zeros(self.experts + 1, np.int64)
        candidates = np.empty(flat.size)
        for number, uses in enumerate(self.passes):
            there = flat[uses.at]
            counted = number >= self._from
            if counted:
                hits += int(uses.counts[there].sum())
                self._count_missing(missing, uses.at[~there])
            scores = policy.see(uses, int(self._ends[number] - self._starts[number]))
            wanted = uses.at[~there]
            if uploads_per_pass is not None:
                most = int((number + 1) * uploads_per_pass) - int(number * uploads_per_pass)
                wanted = self._best(wanted, scores, most)
            if not len(wanted):
                continue
            candidates.fill(-np.inf)
            np.copyto(candidates, np.maximum(scores + policy.margin, -1e300), where=flat)
            candidates[wanted] = scores[wanted]
            changed = np.unique(wanted // self.experts)
            rows = candidates.reshape(shape)[changed]
            best = np.argpartition(rows, -slots, axis=1)[:, -slots:]
            held[changed] = False
            held[changed[:, None], best] = True
            if counted:
                uploads += int(flat[wanted].sum())
        return self._result(policy.name, slots, hits, missing, uploads)

    def _count_missing(self, missing: np.ndarray, at: np.ndarray) -> None:
        """Adds a pass to the numbers of `Result.missing`. at: the experts that it missed."""
        of_layers = np.bincount(at // self.experts, minlength=self.layers)
        missing += np.bincount(of_layers, minlength=len(missing))

    def _best(self, wanted: np.ndarray, scores: np.ndarray, count: int) -> np.ndarray:
        """Of each layer, the ``count`` experts with the highest scores."""
        layer = wanted // self.experts
        order = np.lexsort((-scores[wanted], layer))
        begins = np.searchsorted(layer[order], np.arange(self.layers))
        rank = np.arange(len(order)) - begins[layer[order]]
        return wanted[order[rank < count]]

    def fixed(self, name: str, masks: np.ndarray) -> Result:
        """A placement that never changes. masks: bool [L, E], True = hot."""
        flat = masks.reshape(-1)
        hits, missing = 0, np.zeros(self.experts + 1, np.int64)
        for uses in self.passes[self._from :]:
            there = flat[uses.at]
            hits += int(uses.counts[there].sum())
            self._count_missing(missing, uses.at[~there])
        return self._result(name, int(masks.sum()) // self.layers, hits, missing, 0)

    def first(self, slots: int) -> Result:
        """The first experts of each layer."""
        masks = np.zeros((self.layers, self.experts), bool)
        masks[:, : self._check(slots)] = True
        return self.fixed("first experts", masks)

    def learned(self, slots: int) -> Result:
        """The experts of each layer that the tokens before ``counted_from`` used most."""
        return self.fixed("learned before", self._most_used(slots, self.passes[: self._from]))

    def best_fixed(self, slots: int) -> Result:
        """The experts of each layer that the counted tokens used most: the best that a fixed
        placement with as many slots in each layer could be."""
        return self.fixed("best fixed", self._most_used(slots, self.passes[self._from :]))

    def _most_used(self, slots: int, passes: Sequence[Uses]) -> np.ndarray:
        counts = np.zeros(self.layers * self.experts)
        for uses in passes:
            counts[uses.at] += uses.counts
        order = np.argsort(-counts.reshape(self.layers, -1), axis=1, kind="stable")
        masks = np.zeros((self.layers, self.experts), bool)
        np.put_along_axis(masks, order[:, : self._check(slots)], True, axis=1)
        return masks

    def _check(self, slots: int) -> int:
        if not 1 <= slots <= self.experts:
            raise ValueError(f"slots {slots}: expected 1 to {self.experts}")
        return slots

    def _result(
        self, name: str, slots: int, hits: int, missing: np.ndarray, uploads: int
    ) -> Result:
        uses = sum(int(uses.counts.sum()) for uses in self.passes[self._from :])
        missed = int((missing * np.arange(len(missing))).sum())
        counted = tuple(np.trim_zeros(missing, "b").tolist())
        return Result(name, slots, self.tokens, self.layers, uses, hits, missed, uploads, counted)


def second_half(record: RouteRecord) -> Replay:
    """Counts the second half of a record's passes. ValueError if there are fewer than two."""
    starts = np.unique(record.passes, return_index=True)[1]
    if len(starts) < 2:
        raise ValueError(f"{len(starts)} passes: at least 2 are needed")
    return Replay(record, int(starts[len(starts) // 2]))


def as_streams(record: RouteRecord, streams: int) -> RouteRecord:
    """The record as if it were decoded in parallel: it is cut into ``streams`` parts of equal
    length, whose tokens share passes. A rest is left out.

    ValueError for more streams than tokens.
    """
    length = len(record.passes) // streams
    if streams < 1 or not length:
        raise ValueError(f"streams {streams}: expected 1 to {len(record.passes)}")
    routes = record.routes[: length * streams].reshape(streams, length, *record.routes.shape[1:])
    return replace(
        record,
        routes=np.ascontiguousarray(routes.swapaxes(0, 1)).reshape(-1, *record.routes.shape[1:]),
        passes=np.repeat(np.arange(length), streams),
    )
