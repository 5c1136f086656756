"""Files: checks of those that a user named, reading JSON, and replacing a file in one step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

PARTIAL = ".partial"  # suffix of a file that is still being written


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
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"duplicate name {twice!r}")
    return result


class Replacement:
    """A new file that takes the place of `path` in one step.

        with Replacement(path) as new:
            new.write(data)
            new.commit()

    Readers see the old file or the whole new one. Leaving without `commit` removes what was
    written. The new file gets the permissions of the one it replaces, else those of any new file.
    A symbolic link at `path` is replaced, not followed. Every OSError names a file; one that is
    neither a regular file nor a link is refused with an OSError, since it would be gone afterwards.

    durable: whether the new file, once `commit` has returned, survives a loss of power.
    partial: name under which the file is written; only one writer at a time may use it, and what a
    killed one left there is removed. None: a name that nobody can know beforehand. Either way the
    file is created anew in the folder of `path`: nothing that lies there is opened or followed.
    """

    def __init__(self, path: str, *, durable: bool = False, partial: str | None = None) -> None:
        self.path = path
        self._durable = durable
        self._fixed = partial is not None
        self._partial = partial or f"{path}.{secrets.token_hex(8)}{PARTIAL}"

    def __enter__(self) -> Self:
        mode = _permissions(self.path)
        if self._fixed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._partial)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._partial, flags, 0o666)
        if mode is not None:
            with contextlib.suppress(OSError):  # a file system without permissions
                os.fchmod(self._fd, mode)
        return self

    def write(self, data: Any) -> None:
        """Appends a bytes-like object."""
        rest = memoryview(data).cast("B")
        while len(rest):
            with named(self.path):
                rest = rest[os.write(self._fd, rest) :]

    def commit(self) -> None:
        """Puts the file in its place."""
        with named(self.path):
            if self._durable:
                os.fsync(self._fd)
            os.replace(self._partial, self.path)
            if self._durable:
                _sync_folder(os.path.dirname(self.path) or ".")

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):  # it is in its place
            os.unlink(self._partial)


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text as UTF-8 to `path` in one step, see `Replacement`; OSError if it cannot."""
    with Replacement(os.fspath(path)) as new:
        new.write(text.encode())
        new.commit()


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """OSErrors from inside name `path`, which those of open files do not."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from error


def _permissions(path: str) -> int | None:
    """Those of the regular file at `path`, None without one."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode) & 0o777
    if stat.S_ISLNK(mode):
        return None
    raise OSError(errno.EEXIST, "is there, and is not a regular file", path)


def nearest_existing(path: str) -> str:
    """The path itself or the nearest folder above it that exists."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _sync_folder(path: str) -> None:
    """Makes the names in a folder last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
