"""Reads arguments of an engine's command line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def value_of(arguments: Sequence[str], flag: str) -> str:
    """The value of an argument, given as two words or with "="; the last one counts. "" if it is
    not given."""
    found = ""
    for word, following in itertools.pairwise([*arguments, ""]):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
