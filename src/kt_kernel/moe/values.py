"""Checks of plain arguments: numbers and flags."""

from __future__ import annotations

import math
import operator
import struct
from typing import Any


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int in low … high; TypeError or ValueError naming it otherwise."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if number < low or (high is not None and number > high):
        accepted = f"{low} to {high}" if high is not None else f"{low} or more"
        raise ValueError(f"{name}={number}; accepted: {accepted}")
    return number


def real(name: str, value: Any, low: float | None = None) -> float:
    """``value`` as a float32 number; None counts as 0."""
    if value is None:
        return 0.0
    if isinstance(value, bool | str | bytes | bytearray):  # float() would accept them
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}") from None
    single = float32(number)
    vanishes = single == 0 and number != 0  # 0 means "not used"
    if not math.isfinite(single) or vanishes or (low is not None and number < low):
        accepted = "a finite float32 number" + (f" of at least {low:g}" if low is not None else "")
        raise ValueError(f"{name}={value}; accepted: {accepted}")
    return number


def float32(number: float) -> float:
    """The nearest float32 number; inf if there is none."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.inf


def boolean(name: str, value: Any) -> bool:
    """``value``, which must be True or False; TypeError naming it otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value
