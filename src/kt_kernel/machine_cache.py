"""What was measured on this machine, as small JSON files in the user's cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .variant import debug


def cache_file(name: str) -> Path | None:
    """``$XDG_CACHE_HOME/kt-moe/name``, else under ``~/.cache``; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):  # the XDG specification ignores relative paths
        return Path(base) / "kt-moe" / name
    try:
        return Path.home() / ".cache" / "kt-moe" / name
    except RuntimeError:  # no home folder
        return None


def read_cache(path: Path | None) -> dict[str, Any]:
    """The file's object; empty where it is absent, unreadable or corrupt: measure again."""
    if path is None:
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_cache(path: Path | None, content: dict[str, Any]) -> None:
    """Replaces the file in one step. Failure only costs the next process a measurement."""
    if path is None:
        return
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError as error:  # a read-only home, say
        debug(f"could not write {path}: {error}")
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def only_process(path: Path | None) -> Iterator[None]:
    """Holds a lock beside the file, so that one process measures and the others find its result.
    Where it cannot be had, as in a read-only home, every process goes on by itself."""
    with contextlib.ExitStack() as stack:
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(f"{path}.lock", "w", encoding="utf-8"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
