"""Types of the values in a settings file: what is accepted, in words and as a check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..moe.values import float32


@dataclass(frozen=True)
class Kind:
    """A type of values.

    Attributes:
        accepted: what is accepted, for messages and for the documentation.
        check: returns the value, converted if necessary; raises ValueError for others.
    """

    accepted: str
    check: Callable[[Any], Any]


def integer(least: int, most: int = 10**9, *, multiple: int = 1) -> Kind:
    """Whole numbers in a range, both ends included; only multiples of ``multiple``."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value % multiple:
            raise ValueError
        if not least <= value <= most:
            raise ValueError
        return value

    what = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
    return Kind(f"{what}, {least} to {most}", check)


def number(
    least: float, below: float = math.inf, *, above: bool = False, single: bool = False
) -> Kind:
    """Finite numbers from ``least`` up and less than ``below``. above: ``least`` is excluded.
    single: the kernels take the number in float32, in which it must be accepted, too."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        try:
            given = float(value)
        except OverflowError:
            raise ValueError from None
        used = float32(given) if single else given
        if not (least <= used < below and math.isfinite(used)) or (above and used == least):
            raise ValueError
        return given

    words = f"a number above {least:g}" if above else f"a number, {least:g} or more"
    words += "" if below == math.inf else f" and less than {below:g}"
    return Kind(f"{words}, in float32" if single else words, check)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


FLAG = Kind("true or false", _flag)
TEXT = Kind("a string", _text)


def texts(least: int) -> Kind:
    """At least ``least`` different strings."""

    def check(value: Any) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) < least:
            raise ValueError
        found = tuple(map(_text, values))
        if len(set(found)) < len(found):
            raise ValueError
        return found

    return Kind(f"a string, or a list of different strings, {least} or more", check)


def one_of(*names: str) -> Kind:
    """One of several strings."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Kind(", ".join(f'"{name}"' for name in names), check)
