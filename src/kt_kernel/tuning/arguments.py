"""Reads arguments of an engine's command line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def value_of(arguments: Sequence[str], flag: str) -> str:
    """The value of an argument, given as two words or with "="; the last one counts. "" if it is
    not given. vLLM takes _ for -."""
    found = ""
    for word, following in itertools.pairwise([*arguments, ""]):
        name, sign, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if sign else following
    return found
