"""Selects which cases of a grid of parameters run: some on each change, all with KT_FULL=1.

A grid is the product of named axes, such as instruction set, weight format, kind of kernel and
shape. The selection is a covering array of strength two: every pair of values of two axes is in at
least one case. A test that needs more than pairs names goals. `make test-full` runs whole grids.
A case has the same name in both, so any case of a grid can be run by its name:

    KT_FULL=1 make test-core ARGS="-k avx2-bf16-VECTOR-4x2x33x45"
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

FULL = os.environ.get("KT_FULL", "0") not in ("", "0")
only_full = pytest.mark.skipif(not FULL, reason="KT_FULL is not set (make test-full sets it)")

Axes = Mapping[str, Sequence[Any]]
Case = tuple[Any, ...]
Where = Callable[[Any], bool]
Goal = Callable[[Any], Hashable]


def examples(count: int, full: int | None = None) -> int:
    """The number of random inputs to try: ``count``, or with KT_FULL ``full`` (5 times that)."""
    if not FULL:
        return count
    return 5 * count if full is None else full


def grid(
    *, where: Where | None = None, goals: Sequence[Goal] = (), **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrizes a test with the cases of a grid.

    ``axes`` are the values of each parameter, which must be hashable. The name of a value in the
    name of a case is its attribute ``name``, or the value itself; the parts of a tuple are joined
    with "x", and spaces become "_". A value whose attribute ``missing`` is a text cannot run on
    this machine. It gets one case, which is skipped with that text, and the cases of the other
    values cover all pairs and goals without it.

    ``where`` and ``goals`` are called with a case, whose attributes are its values. A case for
    which ``where`` is false is left out. Results of a goal other than None are covered, too: for
    each result that occurs in the grid, at least one selected case has it.
    """
    usable = {name: [v for v in values if not _missing(v)] for name, values in axes.items()}
    cases = whole(usable, where) if FULL else covering(usable, where, goals)
    params = [pytest.param(*case, id="-".join(map(name_of, case))) for case in cases]
    for name, values in axes.items():
        for value in filter(_missing, values):
            case = [value if other == name else axes[other][0] for other in axes]
            skip = pytest.mark.skip(reason=_missing(value))
            params.append(pytest.param(*case, id=name_of(value), marks=skip))
    return pytest.mark.parametrize(list(axes), params)


def name_of(value: Any) -> str:
    name = getattr(value, "name", None)
    if name is not None:
        return str(name)
    if isinstance(value, tuple):
        return "x".join(map(name_of, value))
    return str(value).removeprefix("torch.").replace(" ", "_")


def _missing(value: Any) -> str | None:
    return getattr(value, "missing", None)


def whole(axes: Axes, where: Where | None = None) -> list[Case]:
    """The grid: the product of the axes, without the cases that are left out."""
    cases = itertools.product(*axes.values())
    return [case for case in cases if where is None or where(_named(axes, case))]


def covering(axes: Axes, where: Where | None = None, goals: Sequence[Goal] = ()) -> list[Case]:
    """Cases of the grid, in its order, that cover every pair of values and every goal.

    Greedy: the next case is the one that covers most of the rest. Of equal ones, the first in a
    fixed random order is taken, so that values on which no pair depends vary.
    """
    cases = whole(axes, where)
    needs = [set(_needs(axes, case, goals)) for case in cases]
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)
    # The gain of a case can only fall while others are chosen. If it has not changed since the case
    # was put into the heap, it is the largest one.
    heap = [(-len(needs[index]), place, index) for place, index in enumerate(order)]
    heapq.heapify(heap)
    left = set().union(*needs)
    chosen = []
    while left:
        before, place, index = heapq.heappop(heap)
        now = -len(needs[index] & left)
        if now == before:
            chosen.append(index)
            left -= needs[index]
        elif now:
            heapq.heappush(heap, (now, place, index))
    return [cases[index] for index in sorted(chosen)]


def _needs(axes: Axes, case: Case, goals: Sequence[Goal]) -> Iterator[Hashable]:
    """Everything that a case covers."""
    placed = list(enumerate(case))
    yield from itertools.combinations(placed, 2) if len(placed) > 1 else placed
    for number, goal in enumerate(goals):
        if (result := goal(_named(axes, case))) is not None:
            yield f"goal {number}", result


def _named(axes: Axes, case: Case) -> SimpleNamespace:
    return SimpleNamespace(**dict(zip(axes, case, strict=True)))
