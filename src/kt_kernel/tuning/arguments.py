"""Reads arguments of an engine's command line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def with_changes(engine: str, arguments: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """The arguments with further changes of the model's configuration, by key, which replace those
    of the user.

    The last JSON object counts. vLLM also has ``--hf-overrides.KEY VALUE``: it makes one object of
    all of them, and then no other object counts.
    """
    flag = OVERRIDES_FLAG[engine]
    kept: list[str] = []
    by_key = False
    words = iter(arguments)
    for word in words:
        name, sign, _ = word.partition("=")
        start, dot, keys = name.partition(".")
        if engine != "vllm" or not dot or name_of(start) != flag:
            kept.append(word)
            continue
        by_key = True
        given = [word, *itertools.islice(words, 0 if sign else 1)]
        if keys.partition(".")[0].rstrip("+") not in changes:  # vLLM would join lists of one key
            kept += given
    if by_key:
        pairs = ((f"{flag}.{key}", json.dumps(value)) for key, value in changes.items())
        return kept + list(itertools.chain.from_iterable(pairs))
    return [*kept, flag, json.dumps({**_changes(arguments, flag), **changes})]


def _changes(arguments: Sequence[str], flag: str) -> dict[str, Any]:
    """The JSON object of an argument. Empty if there is none, or none that the engine accepts."""
    try:
        changes = json.loads(value_of(arguments, flag) or "{}")
    except json.JSONDecodeError:
        return {}
    return changes if isinstance(changes, dict) else {}
