"""Formats parts of messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

# Bytes, as options accept them: the units of all sizes of memory and files. What is moved, and
# rates such as GB/s, have decimal units.
SIZES = {"MB": 1 << 20, "GB": 1 << 30}
_LISTED = 8


def ranges(ascending: Iterable[int], separator: str = ",") -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    parts: list[list[int]] = []
    for number in ascending:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return separator.join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def bracketed(ascending: Sequence[int]) -> str:
    """[0, 1, 5] as " [0-1,5]", and no numbers as an empty text."""
    return f" [{ranges(ascending)}]" if ascending else ""


def lacking(missing: Mapping[int, Sequence[str]]) -> str:
    """{3: ["gate", "up"], 4: ["gate", "up"], 5: [], 6: ["up"]} as "3-4 (gate, up); 6 (up)". Experts
    that lack the same stand together. At most eight such groups are named."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for expert, names in missing.items():
        if names:
            groups.setdefault(tuple(names), []).append(expert)
    found = [f"{ranges(experts)} ({', '.join(names)})" for names, experts in groups.items()]
    more = sum(map(len, [*groups.values()][_LISTED:]))
    return "; ".join(found[:_LISTED]) + (f"; and {more} more experts" if more else "")


def shown_size(size: float, *, down: bool = False) -> str:
    """A number of bytes as options accept it. Rounded up, because what a message asks for must be
    enough, or ``down``: what it says is there must be there."""
    name = "GB" if size >= SIZES["GB"] else "MB"
    # An option's value has lost up to a byte, and is still shown as it was given.
    hundredths = math.floor(100 * (size + 1) / SIZES[name]) if down else 100 * size / SIZES[name]
    text = f"{math.ceil(hundredths) / 100:.2f}"
    return text.rstrip("0").rstrip(".") + name
