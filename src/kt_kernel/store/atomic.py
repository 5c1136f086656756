"""Files that are there whole or not at all, also after a crash or a loss of power."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PARTIAL = ".partial"  # suffix of a file being written


class AtomicFile:
    """Writes `path` under a temporary name beside it; `commit` puts it in place.

        with AtomicFile(path) as file:
            file.write(data)
            file.commit()

    Leaving without `commit` removes what was written. Every OSError names the file. Only one
    writer at a time may use a path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._temporary = path + PARTIAL
        self._hash = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, "kt-hash")  # takes as long as writing: beside it
        self.bytes = 0

    def __enter__(self) -> AtomicFile:
        self._fd = os.open(
            self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
        )
        return self

    def write(self, data: Any) -> None:
        """Appends a bytes-like object."""
        rest = memoryview(data).cast("B")
        self.bytes += len(rest)
        hashed = self._hasher.submit(self._hash.update, rest)
        try:
            while len(rest):
                with named(self.path):
                    rest = rest[os.write(self._fd, rest) :]
        finally:
            hashed.result()  # the caller may use the memory again

    @property
    def sha256(self) -> str:
        """Of what was written so far."""
        return self._hash.hexdigest()

    def commit(self) -> None:
        with named(self.path):
            os.fsync(self._fd)
            os.replace(self._temporary, self.path)
            sync_folder(os.path.dirname(self.path))

    def __exit__(self, *error: object) -> None:
        self._hasher.shutdown()
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):  # it is in its place
            os.unlink(self._temporary)


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """OSErrors from inside name `path`, which those of open files do not."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from error


def nearest_existing(path: str) -> str:
    """The path itself or the nearest folder above it that exists."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def sync_folder(path: str) -> None:
    """Makes the names in a folder last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Stopped(Exception):
    """Ends a checksum that nobody waits for any more."""


@contextlib.contextmanager
def until_left(progress: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """A `progress` for other threads that ends what calls it once the block was left by an error or
    an interrupt, so that nobody waits for the end of a large file."""
    left = threading.Event()

    def call(count: int) -> None:
        if left.is_set():
            raise _Stopped
        progress(count)

    try:
        yield call
    except BaseException:
        left.set()
        raise


def sha256_of(path: str, progress: Callable[[int], None] = lambda count: None) -> str:
    """Checksum of a file. progress: called with the bytes of each piece read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file, named(path):
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            progress(count)
    return digest.hexdigest()
