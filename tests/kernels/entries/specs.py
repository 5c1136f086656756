"""What an argument of a compiled entry accepts, and the values to try."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_INTS = sorted(
    {sign * (1 << bits) + d for sign in (-1, 1) for bits in (31, 32, 62, 63, 64) for d in (-1, 0)}
    | {-1, 0, 1, 3, 99, 10**30}
)
_NO_NUMBERS = (None, 1.5, "1", [1], object())


class Try(NamedTuple):
    """One value for one argument."""

    value: Any
    refused: bool = True  # whether the call must raise; otherwise it may
    says: str = ""  # must occur in the message of a ValueError


@dataclass(frozen=True)
class Number:
    """An integer from low to high. inside: whether the call may be made with low and high, which is
    wrong if the number describes memory behind an address. none: None is accepted, too."""

    good: int
    low: int
    high: int
    inside: bool = False
    none: bool = False

    def tries(self) -> Iterator[Try]:
        for value in sorted({*_INTS, self.low - 1, self.high + 1}):
            if not self.low <= value <= self.high:
                yield Try(value, says=str(value))
        for other in _NO_NUMBERS:
            yield Try(other, not (self.none and other is None))
        if self.inside:
            yield Try(self.low, False)
            yield Try(self.high, False)


@dataclass(frozen=True)
class Address:
    """good = 0: none is given, which is accepted. says: must occur in the message for 0."""

    good: int
    says: str = "address 0"

    def tries(self) -> Iterator[Try]:
        if self.good:
            yield Try(0, says=self.says)
        yield from map(Try, (-1, 1 << 64, *_NO_NUMBERS))


@dataclass(frozen=True)
class Real:
    """refused: numbers that are refused, in addition to NaN and infinities; None: nothing is
    refused.
    infinite: infinity is accepted."""

    good: float
    refused: tuple[float, ...] | None = None
    infinite: bool = False

    def tries(self) -> Iterator[Try]:
        any_number = self.refused is None
        yield Try(math.nan, not any_number)
        yield Try(-math.inf, not any_number)
        yield Try(math.inf, not (any_number or self.infinite))
        yield from map(Try, self.refused or ())
        yield from map(Try, (None, "1", [1.0]))


@dataclass(frozen=True)
class Text:
    good: str
    any: bool = False  # text is accepted

    def tries(self) -> Iterator[Try]:
        for text in ("", "\0", "no such", "x" * 100_000, "\N{SNOWMAN}"):
            yield Try(text, not self.any)
        yield from map(Try, (None, 1, b"avx2"))


@dataclass(frozen=True)
class Flag:
    """optional: whether None is accepted."""

    good: bool
    optional: bool = False

    def tries(self) -> Iterator[Try]:
        yield from map(Try, ("yes", 1.5) if self.optional else (None, "yes", 1.5))


@dataclass(frozen=True)
class Some:
    """An object of a class of the module."""

    good: Any

    def tries(self) -> Iterator[Try]:
        yield from map(Try, (None, 0, "x", object()))


@dataclass(frozen=True, eq=False)
class Array:
    """free: axes that may have any size. flat: any number of dimensions is accepted, with as many
    values. exact: arrays of other types are not converted. optional: None is accepted."""

    good: np.ndarray | None
    free: tuple[int, ...] = ()
    flat: bool = False
    exact: bool = False
    optional: bool = False

    def tries(self) -> Iterator[Try]:
        yield Try(None, not self.optional)
        if (a := self.good) is None:
            return
        yield from map(Try, (0, "x", a.ctypes.data))
        for axis in range(a.ndim):
            for size in (0, a.shape[axis] + 1):
                shape = [*a.shape[:axis], size, *a.shape[axis + 1 :]]
                yield Try(np.zeros(shape, a.dtype), axis not in self.free)
        for other in (a.reshape(-1), a.reshape(*a.shape, 1), a.reshape(1, *a.shape)):
            if other.ndim != a.ndim:
                yield Try(other, not self.flat)
        yield Try(np.asfortranarray(a), False)  # copied, or refused
        yield Try(a[..., ::-1], False)
        yield Try(a.astype(np.float16), self.exact)
        yield Try(np.zeros((), a.dtype))


def good(spec: Any) -> Any:
    """The value with which a call succeeds."""
    if isinstance(spec, list | tuple):
        return type(spec)(good(part) for part in spec)
    return spec.good


def tries(spec: Any) -> Iterator[Try]:
    """Values instead of the good one. In a list or tuple, one part is replaced at a time."""
    if not isinstance(spec, list | tuple):
        yield from spec.tries()
        return
    whole = good(spec)
    for i, part in enumerate(spec):
        for one in tries(part):
            yield one._replace(value=type(spec)([*whole[:i], one.value, *whole[i + 1 :]]))
    yield from map(Try, (None, 5, "x"))
    yield Try(whole[:-1], False)
