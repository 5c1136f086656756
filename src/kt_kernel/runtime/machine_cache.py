"""Measurements of this machine, as small JSON files in the user's cache folder.

    kt cache            # shows them
    kt cache --clear    # removes them

A measurement is kept under a key that names everything it depends on. Measurements on a busy
machine, or with inconsistent results, are not kept. A folder that is unreadable, not writable or
holds other files only means that measurements are repeated.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from .file_lock import FileLock
from .files import replace_file
from .machine import allowed_cpus, cpu_times, disturbance
from .variant import debug

FILES = ("threads.json", "tuning.json")
_LOCK = "lock"
_MOST_ENTRIES = 256  # per file: containers may get other CPUs at each start
_MOST_BYTES = 1 << 20

T = TypeVar("T")

# The measurements that this process uses, kept or not.
_known: dict[tuple[Path | None, str], Any] = {}
_one_thread = threading.RLock()
_locked = False  # whether this process holds the lock on the folder
_lock_seconds = 60.0  # maximum wait for the lock: far longer than a measurement
_unwritable = False  # whether this was already reported


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/kt-moe``, else ``~/.cache/kt-moe``; None if there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):  # the XDG specification ignores relative paths
        return Path(base) / "kt-moe"
    try:
        return Path.home() / ".cache" / "kt-moe"
    except RuntimeError:  # no home folder
        return None


def measured_once(
    name: str,
    key: str,
    accept: Callable[[Any], T | None],
    measure: Callable[[], tuple[Any, str | None]],
) -> T:
    """The entry for ``key`` in the cache file ``name``; measured if there is none.

    accept: converts an entry, any JSON value; returns None if it is invalid. measure: returns an
    entry, and None or a reason not to keep it; this process uses it in either case.

    Only one process and thread measures at a time; the others wait and use the kept result.
    """
    folder = cache_folder()
    path = None if folder is None else folder / name
    with _one_thread:
        if (path, key) not in _known:
            entry = read_cache(path).get(key)
            if accept(entry) is None:
                with _lock_on(folder):
                    entry = read_cache(path).get(key)
                    if accept(entry) is None:
                        entry = _measure(path, key, measure)
            debug(f"{key}: {entry}")
            _known[path, key] = accept(entry)
        return _known[path, key]


def _measure(path: Path | None, key: str, measure: Callable[[], tuple[Any, str | None]]) -> Any:
    before = cpu_times()
    entry, doubt = measure()
    doubt = doubt or disturbance(before, cpu_times(), len(allowed_cpus()))
    debug(f"measured, {f'not kept: {doubt}' if doubt else 'to be kept'}")
    if path is not None and doubt is None:
        stored = {name: value for name, value in read_cache(path).items() if name != key}
        newest = dict([*stored.items(), (key, entry)][-_MOST_ENTRIES:])
        try:
            replace_file(path, json.dumps(newest, indent=1) + "\n")
        except OSError as error:
            _cannot_keep(error)
    return entry


def read_cache(path: Path | None) -> dict[str, Any]:
    """The file's JSON object; empty if the file is missing, unreadable or has other content."""
    if path is None:
        return {}
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            return {}
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def entries() -> Iterator[tuple[Path, str, Any]]:
    """File, key and value of all kept entries."""
    folder = cache_folder()
    if folder is None:
        return
    for name in FILES:
        for key, entry in read_cache(folder / name).items():
            yield folder / name, key, entry


def clear() -> list[Path]:
    """Removes what is kept, and what killed processes left; returns the files. Raises OSError
    naming one that cannot be removed. Processes that run go on with what they know."""
    folder = cache_folder()
    removed: list[Path] = []
    if folder is None:
        return removed
    for name in FILES:
        for path in (folder / name, *folder.glob(f"{name}.*")):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
                removed.append(path)
    return removed


@contextlib.contextmanager
def _lock_on(folder: Path | None) -> Iterator[None]:
    """Holds the lock on the folder, which is created if needed. If that is impossible, as in a
    read-only home, this process continues without it."""
    global _locked, _lock_seconds
    lock = None
    if folder is not None and not _locked:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(str(folder / _LOCK))
            _locked = lock.acquire(_lock_seconds)
            if not _locked:
                _lock_seconds = 0.0  # the holder is stuck, so later calls do not wait
        except OSError as error:
            _cannot_keep(error)
    if lock is None or not _locked:
        yield
        return
    try:
        yield
    finally:
        _locked = False
        lock.release()


def _cannot_keep(error: OSError) -> None:
    global _unwritable
    if not _unwritable:
        _unwritable = True
        debug(f"measurements are not kept: {error}")


def _renew_after_fork() -> None:
    global _one_thread, _locked
    _one_thread, _locked = threading.RLock(), False


os.register_at_fork(after_in_child=_renew_after_fork)
