"""Files: checks of paths from users, reading JSON, and atomic replacement."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

PARTIAL = ".partial"  # suffix of a file that is still being written


def need_file(path: str, expected: str) -> None:
    """Raises ValueError unless `path` is a regular file (opening a pipe would wait forever), and
    OSError with the path if it cannot be examined."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path}: not a file; expected {expected}")


def is_inside(folder: str, path: str) -> bool:
    """Whether `path` is `folder` or below it, links resolved. Neither need exist."""
    outer = os.path.realpath(folder)
    return os.path.commonpath([outer, os.path.realpath(path)]) == outer


def parse_object(text: bytes, place: str, unique: bool = False) -> dict[str, Any]:
    """Parses a JSON object. unique: whether a duplicate key is an error.

    Raises ValueError, beginning with `place`, for anything else.
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
    """A new file that replaces `path` atomically.

        with Replacement(path) as new:
            new.write(data)
            new.commit()

    Readers see the old file or the complete new one. Leaving the block without `commit` removes the
    new file. It gets the permissions of the file that it replaces, or the default ones. A symbolic
    link at `path` is replaced, not followed. Every OSError names a file. If `path` is neither a
    regular file nor a link, an OSError is raised, because it would be lost.

    durable: whether the new file survives a power failure once `commit` has returned. partial:
    temporary name of the file. Only one writer at a time may use it, and a file left by a killed
    writer is removed. None: an unpredictable name. In either case the file is created anew in the
    folder of `path`; an existing file or link is never opened.
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
        with named(self.path):
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
        """Moves the file to `path`."""
        with named(self.path):
            if self._durable:
                os.fsync(self._fd)
            os.replace(self._partial, self.path)
            if self._durable:
                _sync_folder(os.path.dirname(self.path) or ".")

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):  # it was moved
            os.unlink(self._partial)


def replace_file(
    path: str | os.PathLike[str], content: str | bytes, *, durable: bool = False
) -> None:
    """Writes text (as UTF-8) or bytes to `path`, atomically, see `Replacement`. Raises OSError."""
    with Replacement(os.fspath(path), durable=durable) as new:
        new.write(content.encode() if isinstance(content, str) else content)
        new.commit()


def need_writable(path: str | os.PathLike[str]) -> None:
    """Raises the OSError that `replace_file` would raise before it writes, for a check before what
    is to be written is computed. Nothing is left behind."""
    with Replacement(os.fspath(path)):
        pass


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Adds `path` to OSErrors raised inside, because those of open files name none."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from error


@contextlib.contextmanager
def reading(path: str) -> Iterator[BinaryIO]:
    """Opens a file to read it. Every OSError inside names it."""
    with named(path), open(path, "rb") as file:
        yield file


def _permissions(path: str) -> int | None:
    """Permissions of the regular file at `path`; None if there is none."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode) & 0o777
    if stat.S_ISLNK(mode):
        return None
    raise OSError(errno.EEXIST, "exists and is not a regular file", path)


def nearest_existing(path: str) -> str:
    """The path itself or the nearest folder above it that exists."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _sync_folder(path: str) -> None:
    """Makes the entries of a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
