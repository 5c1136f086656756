"""Files: checks of paths from users, reading JSON, atomic replacement, and output."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

PARTIAL = ".partial"  # suffix of a file that is still being written
_MOST_LINKS = 40  # that Linux follows in a path


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
        self._fd: int | None = None  # open

    def __enter__(self) -> Self:
        mode = _permissions(self.path)
        if self._fixed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._partial)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with named(self.path):
            fd = self._fd = os.open(self._partial, flags, 0o666)
        if mode is not None:
            with contextlib.suppress(OSError):  # a file system without permissions
                os.fchmod(fd, mode)
        return self

    def write(self, data: Any) -> None:
        """Appends a bytes-like object."""
        assert self._fd is not None  # nothing is written after `commit`
        rest = memoryview(data).cast("B")
        while len(rest):
            with named(self.path):
                rest = rest[os.write(self._fd, rest) :]

    def commit(self) -> None:
        """Moves the file to `path`."""
        with named(self.path):
            assert self._fd is not None
            if self._durable:
                os.fsync(self._fd)
            self._close()  # before the old file goes: NFS reports a full disk only here
            os.replace(self._partial, self.path)
            if self._durable:
                _sync_folder(os.path.dirname(self.path) or ".")

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __exit__(self, *error: object) -> None:
        try:
            self._close()
        finally:
            with contextlib.suppress(FileNotFoundError):  # it was moved
                os.unlink(self._partial)


def replace_file(
    path: str | os.PathLike[str], content: str | bytes, *, durable: bool = False
) -> None:
    """Writes text (as UTF-8) or bytes to `path`, atomically, see `Replacement`. Raises OSError."""
    with Replacement(os.fspath(path), durable=durable) as new:
        new.write(_bytes(content))
        new.commit()


def need_replaceable(path: str | os.PathLike[str]) -> None:
    """Raises the OSError that `replace_file` would raise before it writes, for a check before what
    is to be written is computed. Nothing is left behind."""
    with Replacement(os.fspath(path)):
        pass


def write_output(
    path: str | os.PathLike[str], content: str | bytes, *, again: bool = False
) -> None:
    """Writes a result to what a user named. A file is replaced atomically, and links to it stay. A
    pipe or a character device, such as /dev/stdout, is written to; a pipe is waited for until it
    has a reader.

    again: whether it is written more than once; then only a file is accepted. Raises OSError.
    """
    path = os.fspath(path)
    number = _descriptor(path)
    if again or (number is None and not _is_stream(path)):
        replace_file(followed(path), content)
        return
    with named(path):
        if number is None:
            fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        else:
            if sys.stdout is not None:
                sys.stdout.flush()  # what was printed before comes first
            fd = os.dup(number)
        with open(fd, "wb") as file:
            file.write(_bytes(content))


def need_writable(path: str | os.PathLike[str], *, again: bool = False) -> None:
    """Raises the OSError that `write_output` would raise before it writes, for a check before what
    is to be written is computed. Nothing is left behind, and no pipe is opened."""
    path = os.fspath(path)
    number = _descriptor(path)
    if again or (number is None and not _is_stream(path)):
        need_replaceable(followed(path))
    elif number is None:
        _need_permission(path)
    else:
        with named(path):
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, "is open for reading only", path)


def followed(path: str) -> str:
    """The file to replace where a user named `path`: what a link there names, else `path`.

    Raises OSError for links in a circle, for what is no regular file, for an open file of this
    process, and if this process may not write to the file.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:  # or a link to a file that is yet to be made
        return os.path.realpath(path) if os.path.islink(path) else path
    if not stat.S_ISREG(mode) or _descriptor(path) is not None:
        raise _not_regular(path)
    _need_permission(path)
    return os.path.realpath(path) if os.path.islink(path) else path


def need_folder(path: str) -> None:
    """Raises OSError unless `path` is a folder for new files, or one that can be made."""
    folder = nearest_existing(path)
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    _need_permission(folder)


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


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _need_permission(path: str) -> None:
    """Raises OSError if this process may not write to the file, pipe or folder."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def _is_stream(path: str) -> bool:
    """Whether it is a pipe or a character device, which cannot be replaced."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
    return False


def _descriptor(path: str) -> int | None:
    """The number of this process's open file that a path such as /dev/stdout names, else None.

    Such a file must not be replaced or opened anew: the process goes on to write to the old one, at
    its own place.
    """
    own = f"/proc/{os.getpid()}/fd"
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        if name.isdecimal() and os.path.realpath(folder or ".") == own:
            return int(name)
        if not os.path.islink(path):
            break
        path = os.path.join(folder, os.readlink(path))
    return None


def _permissions(path: str) -> int | None:
    """Permissions of the regular file at `path`; None if there is none."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not path:  # names no file
            raise
        return None
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode) & 0o777
    if stat.S_ISLNK(mode):
        return None
    raise _not_regular(path)


def _not_regular(path: str) -> OSError:
    return OSError(errno.EEXIST, "exists and is not a regular file", path)


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
