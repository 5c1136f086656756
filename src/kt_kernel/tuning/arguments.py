"""Reads arguments of an engine's command line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

#: The argument of each engine that changes a model's configuration.
OVERRIDES_FLAG = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}


def name_of(word: str) -> str:
    """The name in ``--name`` or ``--name=value``, with - for _, which vLLM accepts, too."""
    return word.partition("=")[0].replace("_", "-")


def value_of(arguments: Sequence[str], flag: str) -> str:
    """The value of an argument, given as two words or with "="; the last one counts. "" if it is
    not given."""
    found = ""
    for word, following in itertools.pairwise([*arguments, ""]):
        if name_of(word) == flag:
            _, sign, value = word.partition("=")
            found = value if sign else following
    return found
