"""Checks of files and folders that a user named, and of what is in them."""

from __future__ import annotations

import json
import os
import stat
from typing import Any


def need_file(path: str, expected: str) -> None:
    """ValueError for what is no regular file: opening a pipe would wait for ever. Raises OSError
    with the path for what cannot be looked at."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path}: not a file; expected {expected}")


def is_inside(folder: str, path: str) -> bool:
    """Whether `path` is `folder` or below it, links resolved. Neither need exist."""
    outer = os.path.realpath(folder)
    return os.path.commonpath([outer, os.path.realpath(path)]) == outer


def parse_object(text: bytes, place: str, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a text. unique: whether a key that is there twice is an error.

    Raises ValueError that begins with `place` for anything else.
    """
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{place}{type(content).__name__}, expected a JSON object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate name {twice!r}")
    return result
