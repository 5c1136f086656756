"""The selection of cases covers what it says, for any grid and for those of the kernels' tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import grid
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import core, test_products

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def pairs(cases: Sequence[grid.Case]) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def axes_of(lengths: list[int]) -> dict[str, range]:
    return {f"axis{i}": range(length) for i, length in enumerate(lengths)}


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_every_pair_and_every_value(lengths: list[int]) -> None:
    axes = axes_of(lengths)
    selected = grid.covering(axes)
    assert len(selected) == len(set(selected)) and set(selected) <= set(grid.whole(axes))
    assert pairs(selected) == pairs(grid.whole(axes))
    for i, length in enumerate(lengths):
        assert {case[i] for case in selected} == set(range(length))


@settings(deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_cases_left_out_and_goals(lengths: list[int], data: st.DataObject) -> None:
    axes = axes_of(lengths)
    kept = set(data.draw(st.lists(st.sampled_from(grid.whole(axes)), min_size=1)))
    modulus = data.draw(st.integers(1, 7))

    def where(case: Any) -> bool:
        return tuple(vars(case).values()) in kept

    def total(case: Any) -> int | None:
        """None for a multiple of three: nothing to cover."""
        found = sum(vars(case).values())
        return found % modulus if found % 3 else None

    def totals(cases: Sequence[grid.Case]) -> set[int | None]:
        return {total(SimpleNamespace(**dict(zip(axes, case, strict=True)))) for case in cases}

    selected = grid.covering(axes, where, [total])
    assert set(selected) <= kept
    assert pairs(selected) == pairs(list(kept))
    assert totals(selected) >= totals(list(kept)) - {None}


def test_the_selection_is_a_small_part() -> None:
    axes = axes_of([9, 9, 9, 9])
    assert 81 <= len(grid.covering(axes)) < 140  # of 6561


def cases_of(test: Any) -> list[Any]:
    """The parameters of a test's cases; those that are skipped have marks."""
    [mark] = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return mark.args[1]


@pytest.mark.skipif(grid.FULL, reason="whole grids run")
def test_every_kernel_of_every_format_meets_tails() -> None:
    cases = [case.values for case in cases_of(test_products.test_shapes) if not case.marks]
    variants = [variant for variant in core.VARIANTS if not variant.missing]
    kernels = set(itertools.product(variants, core.FORMATS, core.KINDS))
    assert {case[:3] for case in cases} == kernels
    every = [variants, core.FORMATS, core.KINDS, test_products.SHAPES]
    assert pairs(cases) == pairs(list(itertools.product(*every)))

    def with_tails(format: core.Format) -> bool:
        return any(test_products.has_tails(format, shape) for shape in test_products.SHAPES)

    without = [format for format in core.FORMATS if not with_tails(format)]
    assert without == [format for format in core.FORMATS if format.group == 128]
    found = {case[:3] for case in cases if test_products.has_tails(case[1], case[3])}
    assert found == {kernel for kernel in kernels if with_tails(kernel[1])}


class Number(NamedTuple):
    value: int
    missing: str | None = None

    @property
    def name(self) -> str:
        return f"n{self.value}"


def test_what_is_missing_is_seen() -> None:
    """One skipped case says why, and the others cover all pairs without it."""
    numbers = [Number(0), Number(1), Number(2, missing="not on this machine")]

    @grid.grid(number=numbers, letter=["a", "b"])
    def test(number: Any, letter: str) -> None: ...

    *cases, skipped = cases_of(test)
    assert skipped.id == "n2" and skipped.values[0] is numbers[2]
    assert [mark.kwargs["reason"] for mark in skipped.marks] == ["not on this machine"]
    assert not any(case.marks for case in cases)
    assert [case.id for case in cases] == ["n0-a", "n0-b", "n1-a", "n1-b"]
    assert [case.values for case in cases] == list(itertools.product(numbers[:2], "ab"))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (core.Variant("_C", "avx2"), "_C-avx2"),
        (core.Format(core.BF16), "bf16"),
        (core.TILE, "TILE"),
        ((4, 2, 33), "4x2x33"),
        (0.5, "0.5"),
        ("one expert", "one_expert"),
    ],
)
def test_names(value: Any, name: str) -> None:
    assert grid.name_of(value) == name


def test_number_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    for full, counts in ((False, [7, 7]), (True, [35, 30])):
        monkeypatch.setattr(grid, "FULL", full)
        assert [grid.examples(7), grid.examples(7, full=30)] == counts
