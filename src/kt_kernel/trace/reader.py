"""Reads the events of a trace file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_SPACE = " \t\r\n"


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a Chrome trace in the array format, in the file's order.

    The array's end may be missing, and what a writer that was killed has left of a last line is
    passed over. Raises OSError, and ValueError naming file and line for anything else.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    at = _skip(text, 0)
    if at == len(text):
        return []
    if text[at] != "[":
        raise _error(path, text, at, 'expected "[": a trace in Chrome\'s array format')
    events: list[dict[str, Any]] = []
    decode = json.JSONDecoder().raw_decode
    at = _skip(text, at + 1)
    while at < len(text) and (text[at] != "]" or not _ends(path, text, at)):
        if events:
            if text[at] != ",":
                raise _error(path, text, at, 'expected "," or "]" after an event')
            at = _skip(text, at + 1)
        try:
            event, end = decode(text, at)
        except (ValueError, RecursionError):
            if text.find("\n", at) < 0:  # cut in its last line
                break
            raise _error(path, text, at, "expected an event, a JSON object in a line") from None
        if not isinstance(event, dict):
            raise _error(path, text, at, f"expected an event, not {json.dumps(event)[:40]}")
        events.append(event)
        at = _skip(text, end)
    return events


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _ends(path: str | os.PathLike[str], text: str, at: int) -> bool:
    rest = _skip(text, at + 1)
    if rest < len(text):
        raise _error(path, text, rest, 'expected nothing after "]"')
    return True


def _error(path: str | os.PathLike[str], text: str, at: int, why: str) -> ValueError:
    line = text.count("\n", 0, at) + 1
    return ValueError(f"{os.fsdecode(path)}: line {line}: not a trace: {why}")
